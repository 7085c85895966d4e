"""Anthropic's Python client, which `make clients` installs."""

from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import MODEL, TOOL, Ride

anthropic = pytest.importorskip("anthropic", reason="make clients installs it")

FUNCTION = TOOL["function"]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 1500,
    "messages": [{"role": "user", "content": "ride"}],
    "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    "extra_body": {"seed": 1},
}
CALLING: dict[str, Any] = {
    **ASKED,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture
def api(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="any", max_retries=0) as api:
        yield api


def test_a_call_and_its_result(api: Any) -> None:
    called = api.messages.create(**CALLING)
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    Ride.model_validate(call.input)
    with api.messages.stream(**CALLING) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].input == call.input
    assert streamed.usage.output_tokens == called.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = api.messages.create(**ASKED | {"messages": history, "tool_choice": {"type": "none"}})
    assert answer.content[0].text
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert total > called.usage.input_tokens + called.usage.cache_read_input_tokens


def test_tokens_and_errors(api: Any) -> None:
    asked = {name: ASKED[name] for name in ("model", "messages", "tools")}
    assert api.messages.count_tokens(**asked).input_tokens > 0
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(**ASKED | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        api.messages.create(**ASKED | {"extra_body": {"top_p": 7}})
    assert [model.id for model in api.models.list()] == [MODEL]
