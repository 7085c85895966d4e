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


def test_a_sampling_parameter_out_of_range_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"top_p must be in \(0, 1\]") as raised:
        Client(transport=MockTransport("")).generate("x", top_p=1.1)
    assert raised.value.metadata == {"param": "top_p"}


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
