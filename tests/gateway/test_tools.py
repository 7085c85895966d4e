"""Tools: how they are shown to the model, and how its calls are read."""

import json
import re
from typing import Any

from fakes.transport import MockTransport

from paceline.gateway.tool_calls import Call

from .conftest import Serve

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string"}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ASK: list[Any] = [{"role": "user", "content": "hi"}]
HERMES = (
    "I look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
)


def test_ids_of_calls_are_9_letters_and_digits() -> None:
    """Templates of Mistral's models take no others."""
    ids = {Call("f", "{}").id for _ in range(99)}
    assert len(ids) == 99
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)


async def test_calls_streamed_and_whole(serve: Serve) -> None:
    async with serve(MockTransport(HERMES), chat_template=PLAIN) as served:
        create = served.openai.chat.completions.create
        asked: Any = {"model": "mock", "messages": ASK, "tools": [WEATHER, CLOCK]}
        whole = (await create(**asked)).choices[0]
        assert whole.message.content == "I look."
        assert whole.finish_reason == "tool_calls"
        names = [call.function.name for call in whole.message.tool_calls or ()]  # type: ignore[union-attr]
        assert names == ["weather", "clock"]

        choices = [event.choices[0] async for event in await create(**asked, stream=True)]
        deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert [delta.index for delta in deltas] == [0, 1]
        assert all(delta.id and delta.function and delta.function.name for delta in deltas)
        assert "".join(choice.delta.content or "" for choice in choices) == "I look."
        assert choices[-1].finish_reason == "tool_calls"

        single = (await create(**asked, parallel_tool_calls=False)).choices[0]
        assert len(single.message.tool_calls or ()) == 1
        ignored = (await create(**asked, tool_choice="none")).choices[0]
        assert (ignored.message.content, ignored.message.tool_calls) == (HERMES, None)


async def test_required_calls_are_a_schema(serve: Serve) -> None:
    reply = '[{"name":"weather","arguments":{"city":"Rom"}},{"name":"clock","arguments":{}}]'
    async with serve(MockTransport(reply), chat_template=PLAIN) as served:
        answer = await served.openai.chat.completions.create(
            model="mock", messages=ASK, tools=[WEATHER, CLOCK], tool_choice="required"
        )
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls] == ["weather", "clock"]  # type: ignore[union-attr]
        schema = json.loads(served.transport.requests[-1].sampling.json_schema)
        moved = schema["$defs"]["arguments0"]["properties"]["city"]["$ref"]
        assert moved == "#/$defs/arguments0/$defs/City"
        consts = [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]]
        assert consts == ["weather", "clock"]


async def test_a_named_function_is_called(serve: Serve) -> None:
    async with serve(MockTransport('{"city":"Rom"}'), chat_template=PLAIN) as served:
        name: Any = {"type": "function", "function": {"name": "weather"}}
        answer = await served.openai.chat.completions.create(
            model="mock", messages=ASK, tools=[WEATHER, CLOCK], tool_choice=name
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Rom"}')
        schema = json.loads(served.transport.requests[-1].sampling.json_schema)
        assert schema == WEATHER["function"]["parameters"] | {"additionalProperties": False}
