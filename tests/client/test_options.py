"""Bad parameters are refused before anything is sent, with what was expected."""

from pathlib import Path
from typing import Any

import pytest

from paceline.client import (
    Client,
    DraftOptions,
    InvalidRequestError,
    MockTransport,
    RetryOptions,
    TlsOptions,
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, not 0"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias key"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias value"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias value"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop string must be non-empty"),
        ({"stop": ""}, "stop string must be non-empty"),
        ({"stop_token_ids": [-1]}, "stop token id"),
        ({"logprobs": 21}, "logprobs"),
        ({"deadline": 0.0}, "deadline"),
        ({"max_nodes": 0}, "max_nodes"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        Client(transport=MockTransport("")).generate("x", **options)


def test_either_an_address_or_a_transport_is_required() -> None:
    with pytest.raises(InvalidRequestError, match="either"):
        Client()
    with pytest.raises(InvalidRequestError, match="either"):
        Client("127.0.0.1:1", transport=MockTransport(""))
    with pytest.raises(InvalidRequestError, match="unread_chunks"):
        Client("127.0.0.1:1", unread_chunks=0)


def test_options_are_checked_when_created() -> None:
    with pytest.raises(InvalidRequestError, match="both"):
        TlsOptions(cert=Path("a"))
    with pytest.raises(InvalidRequestError, match="budget"):
        RetryOptions(budget=-1)
    with pytest.raises(InvalidRequestError, match="first_delay"):
        RetryOptions(first_delay=3, longest_delay=2)
    with pytest.raises(InvalidRequestError, match="timeout"):
        DraftOptions(timeout=0)
