"""Calls in JSON without a mark: the whole answer is objects that fit tools, in fences or not."""

import json
import threading
from typing import Any

import pytest
from fakes.transport import MockTransport

from paceline.gateway.channels import parser_of
from paceline.gateway.requests import Tool, ToolUse
from paceline.gateway.tool_calls import Call
from paceline.gateway.tool_schemas import fits

from .conftest import Serve
from .test_call_forms import PROMPT, parsed

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
TOOLS = [
    Tool.model_validate({"function": {"name": "weather", "parameters": PARAMETERS}}),
    Tool.model_validate({"function": {"name": "clock"}}),
]
USE = ToolUse(TOOLS, "auto")
ROME = '{"name": "weather", "arguments": {"city": "Rom"}}'
CLOCK = '{"name": "clock", "arguments": {}}'
ONE, TWO = [("weather", {"city": "Rom"})], [("weather", {"city": "Rom"}), ("clock", {})]
INDENTED = json.dumps(json.loads(ROME), indent=2)

CALLS: list[tuple[str, list[Any]]] = [
    (ROME, ONE),
    (f"\n\n{INDENTED}\n", ONE),
    (f"```json\n{ROME}\n```", ONE),
    (f"```\n{INDENTED}\n```\n", ONE),
    (f"```tool_call\n{ROME}```", ONE),
    (f"```json\n{ROME}", ONE),
    (f"```json\n{ROME}\n``", ONE),
    (f"```json\n{ROME}\n{CLOCK}\n```", TWO),
    (f"```json\n{ROME},\n{CLOCK}\n```", TWO),
    (f"```json\n[{ROME}, {CLOCK}]\n```", TWO),
    (f"```json\n{ROME}\n```\n\n```json\n{CLOCK}\n```", TWO),
    (f"{ROME}\n{CLOCK}", TWO),
    (f"[{ROME}, {CLOCK}]", TWO),
    (f'```json\n{{"function": {CLOCK}, "type": "function", "id": "1"}}\n```', TWO[1:]),
    ('{"arguments": {"city": "Rom"}, "name": "weather"}', ONE),
    (ROME.replace('{"city": "Rom"}', json.dumps('{"city": "Rom"}')), ONE),
    ('```json\n{"name": "clock"}\n```', TWO[1:]),
]
TEXTS = [
    f"{ROME} is what I would call.",
    f"I call this:\n```json\n{ROME}\n```",
    f"```json\n{ROME}\n```\nIt shows the weather.",
    f"{ROME}\n{{",
    f'{ROME}, {{"name": "wea',
    f"{ROME}\n```python\nprint(1)\n```",
    f"[{ROME}, 1]",
    '```json\n{"name": "other", "arguments": {}}\n```',
    '{"name": "weather", "arguments": {"city": 3}}',
    '{"name": "weather", "arguments": {"days": 1}}',
    '{"name": "weather", "arguments": {"city": "Rom", "days": 0}}',
    '{"name": "weather", "arguments": "Rom"}',
    '{"name": "weather", "city": "Rom"}',
    '{"name": "weather", "arguments": {"city": "Rom"}, "comment": "x"}',
    '{"name": "clock", "arguments": {"city": "Rom"}}',
    "```json\n[]\n```",
    "```",
    "[]",
    "``",
]


@pytest.mark.parametrize(("text", "calls"), [*CALLS, *((text, []) for text in TEXTS)])
def test_an_answer_is_calls_as_a_whole_or_not_at_all(text: str, calls: list[Any]) -> None:
    for thought in ("", "<think>Hm.</think>"):
        for pieces in ([thought + text], [*thought, *text]):
            content, _, found = parsed(parser_of(USE, frozenset()), pieces)
            assert (content, found) == ("" if calls else text, calls)


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        ("```p", ""),
        ("```python\n", "print"),
        ("`", "a`"),
        ("```json\n{", '"x'),
        ('{"name": "', "other"),
        ('{"name": "weather"', ', "city"'),
        ('{"name": "weather", "arguments": ', "3"),
        ('{"name": "weather", "arguments": {"city": 3}', "}"),
        (ROME + "\n", "I"),
        ("[", "1,"),
        ('[{"id": 1, "name": "weathe', 'y"'),
    ],
)
def test_text_is_held_back_while_it_may_be_calls(start: str, rest: str) -> None:
    parser = parser_of(USE, frozenset())
    assert [part for piece in start for part in parser.push(piece)] == []
    if rest:
        assert "".join(map(str, parser.push(rest))) == start + rest
        assert parser.push(" more") == [" more"]


async def test_required_calls_come_one_by_one(serve: Serve) -> None:
    """Nothing but calls can come, so that none waits for the end."""
    parser = parser_of(ToolUse(TOOLS, "required"), frozenset())
    parts = parser.push(f"[{ROME}, ")
    assert [type(part) for part in parts] == [Call]
    assert parser.calls == 1

    async with serve(MockTransport(f"```json\n{ROME}\n```"), chat_template=PROMPT) as served:
        stream: Any = await served.openai.chat.completions.create(
            model="mock",
            messages=[{"role": "user", "content": "x"}],
            tools=[tool.model_dump() for tool in TOOLS],  # type: ignore[misc]
            stream=True,
        )
        choices = [event.choices[0] async for event in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == ""
    assert [call.function.name for choice in choices for call in choice.delta.tool_calls or ()] == [
        "weather"
    ]
    assert choices[-1].finish_reason == "tool_calls"


async def test_arguments_are_compared_beside_the_streams_of_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since a schema may be long."""
    threads = set()

    def compared(value: Any, schema: Any) -> bool:
        threads.add(threading.current_thread())
        return fits(value, schema)

    monkeypatch.setattr("paceline.gateway.tool_calls.fits", compared)
    tools = [tool.for_template() for tool in TOOLS]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "stream": True}
    async with serve(MockTransport(ROME), chat_template="{{ tools }}") as served:
        for fields in (asked, {**asked, "stream": False}):
            await served.ask("POST", "/v1/chat/completions", json=fields)
    assert threads
    assert threading.main_thread() not in threads


S, N = {"type": "string"}, {"type": "null"}
DEFS = {"S": S, "L": {"$ref": "#/$defs/L"}, "T": {"items": {"$ref": "#/$defs/T"}, "type": "array"}}
FITS: list[tuple[Any, list[Any], list[Any]]] = [
    # A schema, values that fit it, and values that do not.
    (S, ["", "a"], [1, None, [], {}, True]),
    ({"type": "integer"}, [1, 2.0], [1.5, "1", True]),
    ({"type": "number"}, [1, 1.5], ["1", False]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"anyOf": [S, N]}, ["a", None], [1]),
    ({"oneOf": [{"const": 1}, {"$ref": "#/$defs/S"}]}, [1, "a"], [2, None, True]),
    ({"allOf": [S, {"minLength": 2}]}, ["ab"], ["a", 3]),
    ({"enum": ["a", 1]}, ["a", 1], ["b", True]),
    ({"minLength": 1, "maxLength": 2}, ["a", 5], ["", "abc"]),
    ({"minimum": 0, "maximum": 1}, [0, 1, 0.5], [-1, 2]),
    ({"type": "array", "items": S, "maxItems": 2}, [[], ["a"]], [["a", 1], ["a"] * 3]),
    ({"prefixItems": [S], "items": N}, [["a"], ["a", None]], [[1], ["a", 1]]),
    ({"properties": {"a": S}, "required": ["a", []]}, [{"a": "b", "c": 1}, 1], [{}, {"a": 1}]),
    ({"properties": {"a": S}, "additionalProperties": False}, [{}, {"a": ""}], [{"b": 1}]),
    ({"additionalProperties": N}, [{"a": None}], [{"a": 1}]),
    ({"patternProperties": {"b": S}, "additionalProperties": False}, [{"b": 1}], []),
    ({"$ref": "#/$defs/T"}, [[], [[[]]]], [1, [[1]]]),
    ({"$ref": "#/$defs/L"}, [1], []),
    ({"$ref": "elsewhere"}, [1], []),
    (True, [1], []),
    (False, [], [1]),
    ({"anyOf": [{"$ref": "#/$defs/0"}] * 2}, [1], []),
]
WAYS = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(99)}


@pytest.mark.parametrize(("schema", "good", "bad"), FITS)
def test_what_fits_a_schema(schema: Any, good: list[Any], bad: list[Any]) -> None:
    root = {"properties": {"x": schema}, "$defs": {**DEFS, **WAYS}}
    assert all(fits({"x": value}, root) for value in good)
    assert not any(fits({"x": value}, root) for value in bad)
