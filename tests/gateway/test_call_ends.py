# ruff: noqa: E501, E741
"""What is a call: what stands outside of thoughts, is complete, and has arguments of its schema."""

import json
import re
from typing import Any

import pytest
from fakes.transport import MockTransport

from paceline.gateway.channels import CHANNEL_MARKS, parser_of
from paceline.gateway.requests import Function, Tool, ToolUse
from paceline.gateway.tool_calls import CALL_MARKS, THOUGHTS

from .conftest import Serve
from .test_call_forms import FORMS, HARMONY, PROMPT, TOOLS, USE, parsed

CHANNELS = {
    f"channels {index}": (text, calls) for index, (text, (_, _, calls)) in enumerate(HARMONY)
}
CUT = "weather", {"city": "Rom </tool_call> </parameter> <parameter= </function> </arg_value> } x"}
JSON_CUT = json.dumps(CUT[1])
LONG = {
    "tags": f"<tool_call>\n<function=weather>\n<parameter=city>\n{CUT[1]['city']}\n</parameter>\n"
    "</function>\n</tool_call>",
    "function": f"<function=weather>\n<parameter=city>\n{CUT[1]['city']}\n</parameter>\n</function>",
    "pairs": f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CUT[1]['city']}</arg_value>\n"
    "</tool_call>",
    "hermes": f'<tool_call>{{"name": "weather", "arguments": {JSON_CUT}}}</tool_call>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON_CUT}",
    "bare": f'{{"name": "weather", "parameters": {JSON_CUT}}}',
    "json in tags": f"<function=weather>{JSON_CUT}</function>",
}
ENDED = {**FORMS, **CHANNELS, **{name: (text, [CUT]) for name, text in LONG.items()}}


def without_marks(text: str) -> str:
    """A text without marks, which may be left out where no call comes, and space around them."""
    for mark in (*sorted(CALL_MARKS, key=len, reverse=True), "functools["):
        text = text.replace(mark, "")
    return re.sub(r"[\s\[\],;]", "", text)


@pytest.mark.parametrize("name", ENDED)
@pytest.mark.parametrize("thought", ["", "<think>Hm.</think>\n"])
def test_a_call_that_is_cut_off_is_none(name: str, thought: str) -> None:
    """Wherever a text ends, its calls are the first of the whole text's, with all arguments."""
    text, calls = ENDED[name]
    channels = name in CHANNELS
    if channels and thought:
        return
    marks = CHANNEL_MARKS if channels else frozenset()
    for end in range(len(text) + 1):
        cut = thought + text[:end]
        content, _, found = parsed(parser_of(USE, marks), [cut])
        assert found == calls[: len(found)]
        assert parsed(parser_of(USE, marks), list(cut)) == (content, _, found)
        if not found and not channels:
            assert without_marks(content) == without_marks(text[:end])
    assert found == calls


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_call_is_text_that_has_ended_by_length(serve: Serve, stream: bool) -> None:
    whole = LONG["tags"]
    text = whole[: whole.index("</parameter>\n</function>")]
    tool: Any = TOOLS[0].model_dump()
    asked: dict[str, Any] = {"model": "mock", "stream": stream}
    async with serve(MockTransport(whole), chat_template=PROMPT) as served:
        chats = served.openai.chat.completions
        for ended in ({"max_tokens": len(text)}, {"stop": ["</parameter>\n</function>"]}):
            answer: Any = await chats.create(
                messages=[{"role": "user", "content": "x"}], tools=[tool], **asked, **ended
            )
            events = [each.choices[0] async for each in answer] if stream else answer.choices
            parts = [each.delta if stream else each.message for each in events]
            assert not any(part.tool_calls for part in parts)
            assert "".join(part.content or "" for part in parts) == text
            assert events[-1].finish_reason == ("length" if "max_tokens" in ended else "stop")
        flat: Any = {"type": "function", **tool["function"]}
        response: Any = await served.openai.responses.create(
            input="x", tools=[flat], max_output_tokens=len(text), **asked
        )
        if stream:
            response = [event async for event in response][-1].response
        assert (response.status, response.output_text) == ("incomplete", text)
        assert [item.type for item in response.output] == ["message"]


@pytest.mark.parametrize("text", ['{"city": "Ro', ""])
def test_a_named_call_that_is_cut_off_is_text(text: str) -> None:
    named = ToolUse(TOOLS, "named", name="weather")
    for marks in (frozenset(), CHANNEL_MARKS):
        assert parsed(parser_of(named, marks), [text]) == (text, "", [])
        whole = parsed(parser_of(named, marks), ['{"city": ', '"Rom"}'])
        assert whole == ("", "", [("weather", {"city": "Rom"})])


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_outside_of_thoughts(form: str) -> None:
    text, calls = FORMS[form]
    for mark, end in THOUGHTS.items():
        cases: list[tuple[str, str, str, str, list[Any]]] = [
            # Text, the mark that ends the thought that it begins in, content, thought and calls.
            (f"{mark}{text} is bad.{end}No.", "", "No.", f"{text} is bad.", []),
            (f"{mark}\nor\n{text}", "", "", f"or\n{text}", []),
            (f"{text} is bad.{end}\n\nNo.", end, "No.", f"{text} is bad.", []),
            (f"{text}{end}\n\n{text}", end, "", text, calls),
            (f"Hm.{end}\n{mark} {text} {end}{text}", end, "", f"Hm.{text}", calls),
            (f"{mark}\n\n{end}\n\n{text}", "", "", "", calls),
            (f"I see.\n{mark}{text}{end} b", "", f"I see.\n{mark}{text}{end} b", "", []),
        ]
        if text.startswith(("<", "[T")):  # a form that needs no start of a text
            cases += [
                (f"a {mark}{text}{end}\n{text}", "", f"a {mark}{text}{end}", "", calls),
                (f"Look for {mark}!\n{text}", "", f"Look for {mark}!", "", calls),
            ]
        for whole, thought_end, content, thought, expected in cases:
            for pieces in ([whole], list(whole)):
                parser = parser_of(USE, frozenset(), thought_end)
                assert parsed(parser, pieces) == (content, thought, expected)


def test_what_gpt_oss_quotes_in_its_answer_is_no_call() -> None:
    text = f"<|channel|>final<|message|>Write {FORMS['hermes'][0]}.<|return|>"
    content, _, calls = parsed(parser_of(USE, CHANNEL_MARKS), [text])
    assert (content, calls) == (f"Write {FORMS['hermes'][0]}.", [])


@pytest.mark.parametrize("opened", ["<think>\n", "<think>\n\n</think>\n\n", "[THINK]", ""])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_thought_that_the_template_begins(serve: Serve, opened: str, stream: bool) -> None:
    call = FORMS["hermes"][0]
    end = "[/THINK]" if opened == "[THINK]" else "</think>"
    async with serve(
        MockTransport(f"{call} no{end}\n{call}"), chat_template=PROMPT + opened
    ) as served:
        answer: Any = await served.openai.chat.completions.create(
            model="mock", tools=[TOOLS[0].model_dump()], stream=stream,  # type: ignore[list-item]
            messages=[{"role": "user", "content": "Say <think>"}],
        )  # fmt: skip
        events = [each.choices[0] async for each in answer] if stream else answer.choices
    parts = [each.delta if stream else each.message for each in events]
    count = sum(len(part.tool_calls or ()) for part in parts)
    assert count == (1 if opened in ("<think>\n", "[THINK]") else 2)


async def test_a_thought_that_is_continued(serve: Serve) -> None:
    call = FORMS["hermes"][0]
    for said, count in (("<think>I", 0), ("<think>I</think>", 1), ("I", 1)):
        async with serve(MockTransport(call), chat_template=PROMPT) as served:
            _, _, body = await served.post(
                "/v1/chat/completions", tools=[TOOLS[0].model_dump()], continue_final_message=True,
                add_generation_prompt=False, messages=[{"role": "assistant", "content": said}],
            )  # fmt: skip
        assert len(body["choices"][0]["message"].get("tool_calls", ())) == count


S, N, I, B = ({"type": name} for name in ("string", "null", "integer", "boolean"))
DEFS = {"S": S, "E": {"enum": ["1", "2"]}, "N": {"anyOf": [{"$ref": "#/$defs/S"}, N]},
        "L": {"$ref": "#/$defs/L"}, "a/b": I}  # fmt: skip
VALUES: list[tuple[Any, str, Any]] = [
    # The schema of an argument, its text and its value.
    *((S, text, text) for text in ("1", "true", "null", "None", '"a"', '{"a": 1}', "['a']", "", " a ", "\na\n")),
    *(
        (schema, text, text)
        for schema in (
            {"anyOf": [S, N]}, {"oneOf": [N, S]}, {"allOf": [{"$ref": "#/$defs/S"}]}, {"type": ["string", "null"]},
            {"$ref": "#/$defs/N"}, {"$ref": "#/$defs/S"}, {"enum": ["12", "true", '{"a": 1}', "1.5", '"q"']},
            {"allOf": [S, {"description": "a name"}]}, {"type": "string", "nullable": True},
            {"anyOf": [{"type": "string", "pattern": "."}, {"type": "string", "enum": ["x"]}]},
            {"anyOf": [{"const": "12"}, {"enum": ["a", None]}]},
        )
        for text in ("12", "true", '{"a": 1}', "1.5", '"q"')
    ),
    *((schema, text, None) for schema in ({"anyOf": [S, N]}, {"type": ["string", "null"]}, {"enum": ["a", None]}, N,
      {"anyOf": [I, N]}, {"type": "integer", "nullable": True}) for text in ("null", "None")),
    ({"enum": ["1", "2"]}, "1", "1"), ({"enum": [1, 2]}, "1", 1), ({"const": "5"}, "5", "5"), ({"enum": ["None"]}, "None", "None"),
    ({"type": ["string", "integer"]}, "5", 5), ({"type": ["string", "integer"]}, "5x", "5x"),
    ({"type": ["string", "integer"]}, "1.0", "1.0"), ({"anyOf": [S, {"type": "array"}]}, "['a', None]", ["a", None]),
    ({"anyOf": [S, {"type": "object"}]}, "{x}", "{x}"),
    (I, "3", 3), (I, " 3\n", 3), (I, "1e3", 1000), (I, "3.0", 3), (I, "123456789012345678901", 123456789012345678901), (I, "x", "x"),
    ({"$ref": "#/$defs/a~1b"}, "3", 3), ({"type": "number"}, "1e3", 1000.0), ({"type": "number"}, "3", 3), ({"type": "number"}, "NaN", "NaN"),
    (B, "True", True), (B, "FALSE", False), (B, "true", True), (B, "yes", "yes"), (I, "null", None), (I, "none", None),
    ({"type": "array", "items": S}, "['a', 'b']", ["a", "b"]), ({"type": "array"}, '["a", true]', ["a", True]),
    ({"type": "array"}, "[True, null, (1, 2)]", [True, None, [1, 2]]), ({"type": "array"}, "a, b", "a, b"),
    ({"type": "object"}, "{'a': {'b': [1]}}", {"a": {"b": [1]}}), ({"type": "object"}, "{'a', 'b'}", "{'a', 'b'}"),
    ({}, "1", 1), ({}, "True", True), ({}, "['a']", ["a"]), ({}, "plain text", "plain text"), ({}, '"a"', "a"), ({}, "none", "none"),
    (True, "1", 1), ({"$ref": "#/$defs/L"}, "1", 1), ({"$ref": "#/no"}, "x", "x"), ({"type": [["a"]]}, "1", 1),
    ({"type": "array"}, "[__import__('os')]", "[__import__('os')]"), ({"type": "array"}, "[" * 9999, "[" * 9999),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_an_argument_in_tags_has_a_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    own = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    referred = {"$ref": "#/$defs/All", "$defs": {**DEFS, "All": own}}
    parts = {"allOf": [own, {"properties": {"y": I}}], "$defs": DEFS}
    options = {"anyOf": [{"properties": {"y": I}}, own], "$defs": DEFS}
    other = {"type": "object", "additionalProperties": schema, "$defs": DEFS}
    for parameters in (own, referred, parts, options, other):
        use = ToolUse([Tool(function=Function(name="f", parameters=parameters))], "auto")
        for written in (
            f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>",
            f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        ):
            content, _, calls = parsed(parser_of(use, frozenset()), [written])
            assert (content, calls) == ("", [("f", {"x": value})])
            assert type(calls[0][1]["x"]) is type(value)


def test_types_of_a_schema_with_many_ways_to_the_same_part_are_found_at_once() -> None:
    levels = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(50)}
    parameters = {"properties": {"city": {"$ref": "#/$defs/0"}}, "$defs": {**levels, "50": S}}
    use = ToolUse([Tool(function=Function(name="weather", parameters=parameters))], "auto")
    text = "<function=weather><parameter=city>1</parameter></function>"
    assert parsed(parser_of(use, frozenset()), [text])[2] == [("weather", {"city": "1"})]
