"""OpenAI's Python client. Completions, streams and errors: tests/system/test_gateway.py."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from .conftest import MODEL, SAMPLED, TOOL, Ride

ASKED: list[Any] = [{"role": "user", "content": "ride"}]


@pytest.fixture
def api(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="any", max_retries=0) as api:
        yield api


def test_a_call_and_its_result(api: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], **SAMPLED}
    called = api.chat.completions.create(
        **asked, messages=ASKED, tool_choice="required", parallel_tool_calls=False
    )
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls or ()
    assert call.type == "function"
    Ride.model_validate_json(call.function.arguments)
    with api.chat.completions.stream(
        **asked, messages=ASKED, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    messages = [
        *ASKED,
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    answer = api.chat.completions.create(**asked, messages=messages, tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert called.usage is not None
    assert answer.usage.prompt_tokens > called.usage.prompt_tokens


def test_structured_output(api: OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL, messages=ASKED, response_format=Ride, **SAMPLED
    )
    assert isinstance(answer.choices[0].message.parsed, Ride)


def test_responses(api: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "ride",
        "text_format": Ride,
        "max_output_tokens": 1500,
        "extra_body": {"seed": 1},
    }
    parsed = api.responses.parse(**asked)
    assert isinstance(parsed.output_parsed, Ride)
    with api.responses.stream(**asked) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        assert stream.get_final_response().output_text == text == parsed.output_text
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    called = api.responses.create(
        model=MODEL, input="ride", tools=[tool], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=1500,
    )  # fmt: skip
    (call,) = called.output
    assert call.type == "function_call"
    Ride.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    history: Any = [{"role": "user", "content": "ride"}, *called.output, result]
    answer = api.responses.create(model=MODEL, input=history, max_output_tokens=20)
    assert answer.output_text
