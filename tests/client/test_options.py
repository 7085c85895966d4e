"""Arguments are checked when a call is made: their types, ranges, and what scalars are taken."""

import itertools
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.transport import MockTransport
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.client import (
    ChatOptions,
    Client,
    DeadlineError,
    DraftOptions,
    GenerationOptions,
    InvalidRequestError,
    RetryOptions,
    SyncClient,
    TlsOptions,
)

ODD: list[Any] = [
    *(range(2**32), range(2**80), itertools.count(), object(), ..., 1j, 10**5000),
    *(np.int64(3), np.float32(0.5), np.bool_(True)),
    *(np.array([1, 2]), np.array(2.5), np.zeros((2, 2))),
    *(torch.tensor(3), torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor(True), Path("/x")),
    *("\ud800", "", "x", {}, [], (), {1, 2}, bytearray(b"x"), lambda *_: None),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.sampled_from(ODD) | st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(SCALARS, inner), max_leaves=8
)


ARGUMENTS = ["prompt", *(field.name for field in fields(ChatOptions))]
MESSAGES = [{"role": "user", "content": "x"}]


def refusal(call: Callable[[], object]) -> InvalidRequestError | None:
    """The error of a call whose arguments are refused; None for another end that they may have."""
    try:
        call()
    except InvalidRequestError as error:
        return error
    except DeadlineError:
        pass
    return None


def call(name: str, value: Any) -> None:
    with SyncClient(transport=MockTransport("fine")) as client:
        given = {"max_new_tokens": 4, name: value}
        if name in ("tools", "chat_template"):
            chat = {"chat_template": "{{ messages[0].content }}", "messages": MESSAGES} | given
            assert client.chat(**chat).finish_reason in ("stop", "length")
        else:
            assert client.generate(**{"prompt": "x"} | given).finish_reason in ("stop", "length")


@settings(max_examples=300)
@given(name=st.sampled_from(ARGUMENTS), value=VALUES)
def test_any_value_of_any_type_ends_in_a_result_or_the_error(name: str, value: Any) -> None:
    error = refusal(lambda: call(name, value))
    if error is not None and name != "chat_template":  # whose text may render to anything
        assert error.message.startswith(name)
        assert error.metadata == {"param": name}


@pytest.mark.parametrize("kind", [Client, TlsOptions, RetryOptions, DraftOptions])
@given(value=VALUES, data=st.data())
def test_options_of_any_type_are_taken_or_refused(
    kind: Callable[..., Any], value: Any, data: st.DataObject
) -> None:
    names = [name for name in signature(kind).parameters if name != "transport"]  # of tests only
    name = data.draw(st.sampled_from(names))
    error = refusal(lambda: kind(**{name: value}))
    assert error is None or name in error.message or "give" in error.message


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("top_k", np.int64(3), 3),
        ("top_k", torch.tensor(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", torch.tensor(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("ignore_eos", np.bool_(True), True),
        ("logprobs", np.bool_(True), True),
        ("logit_bias", {np.int32(1): torch.tensor(2)}, {1: 2.0}),
        ("stop_token_ids", torch.tensor([1, 2]), [1, 2]),
        ("stop_token_ids", (np.int64(1), 2), [1, 2]),
        ("drafter", np.str_("ngram"), "ngram"),
    ],
)
def test_scalars_and_arrays_are_taken_where_they_are_exact(
    name: str, value: Any, same: Any
) -> None:
    taken = getattr(GenerationOptions(**{name: value}), name)
    assert (taken, type(taken)) == (same, type(same))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens must be an integer in \[1, 2\*\*32\), not 0"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer .*, not True"),
        ({"top_k": None}, "top_k must be an integer >= 0 .*, not None"),
        ({"top_k": np.float64(3)}, "top_k must be an integer"),
        ({"top_p": 1.1}, r"top_p must be a number in \(0, 1\], not 1.1"),
        ({"temperature": "hot"}, "temperature must be a finite number >= 0, not 'hot'"),
        ({"stop": [""]}, r"stop\[0\] must be a non-empty text"),
        ({"stop": ""}, r"stop\[0\] must be a non-empty text"),
        ({"stop_token_ids": ["</s>"]}, r"stop_token_ids\[0\] must be a token id.*, not '</s>'"),
        ({"stop_token_ids": [1, -1]}, r"stop_token_ids\[1\] must be a token id.*, not -1"),
        ({"logit_bias": {"a": 1}}, "logit_bias .* must be a token id.*, not 'a'"),
        ({"logprobs": 21}, r"logprobs must be True, False or an integer in \[0, 20\], not 21"),
        ({"deadline": 0.0}, "deadline"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"regex": "\ud800"}, "regex must be a text that UTF-8 can encode"),
    ],
)
def test_the_error_has_the_name_what_it_takes_and_what_came(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        Client(transport=MockTransport("")).generate("x", **options)


@pytest.mark.parametrize("messages", ["", [], [1], [{"role": "user"}], {"a": 1}, range(2**40)])
def test_messages_are_mappings_with_role_and_content(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages"):
        Client(transport=MockTransport("")).chat(messages)


@pytest.mark.parametrize("prompt", ["", [], None, b"ab", [True], [-1], range(2**40)])
def test_a_prompt_is_text_or_token_ids(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt") as raised:
        Client(transport=MockTransport("")).generate(prompt)
    assert raised.value.metadata == {"param": "prompt"}


def test_an_address_or_a_transport_is_given() -> None:
    with pytest.raises(InvalidRequestError, match="either"):
        Client("127.0.0.1:1", transport=MockTransport(""))


def test_options_are_checked_when_created() -> None:
    with pytest.raises(InvalidRequestError, match="both"):
        TlsOptions(cert=Path("a"))
    with pytest.raises(InvalidRequestError, match="cannot read a TLS file"):
        Client("127.0.0.1:1", tls=TlsOptions(ca=Path("/nowhere/ca.pem")))
    with pytest.raises(InvalidRequestError, match="budget"):
        RetryOptions(budget=-1)
    with pytest.raises(InvalidRequestError, match="first_delay"):
        RetryOptions(first_delay=3, max_delay=2)
    with pytest.raises(InvalidRequestError, match="timeout"):
        DraftOptions(timeout=0)
