# ruff: noqa: E501
"""Calls in the forms of families of models, and the channels of gpt-oss."""

import json
from typing import Any

import pytest
from fakes.transport import MockTransport
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.client import Detokenizer, TextCodec
from paceline.gateway.channels import CHANNEL_MARKS, marks_of, parser_of
from paceline.gateway.requests import Function, Tool, ToolUse
from paceline.gateway.tool_calls import CALL_MARKS, Call, Reasoning

from .conftest import Serve

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}},
}  # fmt: skip
TOOLS = [Tool(function=Function(name=name, parameters=PARAMETERS)) for name in ("weather", "clock")]
USE = ToolUse(TOOLS, "auto")
PROMPT = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
ROME: dict[str, Any] = {"city": "Rom"}
ONE = [("weather", ROME)]
TWO = [("weather", ROME), ("clock", {})]

FORMS: dict[str, tuple[str, list[Any]]] = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>', ONE),
    "qwen3-coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=zip>\n00118\n</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": "Rom", "days": 3, "zip": "00118"})],
    ),
    "qwen3-coder without the first tag": (
        "<function=weather>\n<parameter=city>\nRom\n</parameter>\n</function>\n</tool_call>", ONE,
    ),
    "llama 3 tag": ('<function=weather>{"city": "Rom"}</function>', ONE),
    "llama 3": ('{"name": "weather", "parameters": {"city": "Rom"}}', ONE),
    "llama 3, two": (
        '{"name": "weather", "parameters": {"city": "Rom"}}; {"name": "clock", "parameters": {}}', TWO,
    ),
    "llama 3 python tag": ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rom"}}', ONE),
    "llama 3 built in": ('<|python_tag|>weather.call(city="Rom")', ONE),
    "llama 3.2": ('[weather(city="Rom"), clock()]', TWO),
    "mistral v3": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "clock"}]', TWO),
    "mistral v11": ('[TOOL_CALLS]weather[ARGS]{"city": "Rom"}[TOOL_CALLS]clock[ARGS]{}', TWO),
    "mistral v11 with ids": ('[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rom"}', ONE),
    "glm 4.5": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>", [("weather", {"city": "Rom", "days": 3})],
    ),
    "glm 4.5 without arguments": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rom</arg_value></tool_call><tool_call>clock\n</tool_call>", TWO,
    ),
    "granite": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom"}}]', ONE),
    "granite 3.3": ('<tool_call>[{"name": "weather", "arguments": {"city": "Rom"}}]', ONE),
    "phi-4-mini": ('<|tool_call|>[{"type": "function", "name": "weather", "arguments": {"city": "Rom"}}]<|/tool_call|>', ONE),
    "phi-4-mini functools": ('functools[{"name": "weather", "arguments": {"city": "Rom"}}, {"name": "clock"}]', TWO),
    "olmo 3": ('<function_calls>\nweather(city="Rom")\nclock()\n</function_calls>', TWO),
    "glm 4": ('weather\n{"city": "Rom"}', ONE),
    "constants of json in python": (
        '[weather(city="Rom", days=null), clock(zones=[{"all": true}])]',
        [("weather", {"city": "Rom", "days": None}), ("clock", {"zones": [{"all": True}]})],
    ),
}  # fmt: skip


def parsed(parser: Any, pieces: list[str]) -> tuple[str, str, list[Any]]:
    """Content, thoughts and calls."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]
    thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return "".join(part for part in parts if isinstance(part, str)), thoughts, calls


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_in_each_form(form: str) -> None:
    text, calls = FORMS[form]
    for before, said in (("", ""), ("I look.\n\n", "I look.")):
        at_start = ("llama 3.2", "constants of json in python")
        if before and (text[0] not in "<[" or form in at_start):
            continue
        for pieces in ([before + text], list(before + text)):
            assert parsed(parser_of(USE, frozenset()), pieces) == (said, "", calls)
        single = ToolUse(TOOLS, "auto", parallel=False)
        assert parsed(parser_of(single, frozenset()), [before + text])[2] == calls[:1]
        none = parser_of(ToolUse([], "none"), frozenset())
        assert parsed(none, [before + text]) == (before + text, "", [])


NO_CALLS = (
    "Use [TOOL_CALLS] to call.", "<tool_call>none</tool_call>", "[weather in Rom]", "a <b> c", "functools",
    "[weather(", "[other(x=1)]", "<function=", "{'name': 1}", "</tool_call>", "x < y | z",
    "<|python_tag|>print(1)", "[1, 2]", "[weather(city=__import__('os'))]",
)  # fmt: skip


# Marks and brackets within the texts of calls.
QUOTED = [
    ("<tool_call>{}</tool_call>", '{"name": "weather", "arguments": ARGUMENTS}'),
    ("<tool_call>[{}]</tool_call>", '{"name": "weather", "arguments": ARGUMENTS}'),
    ("[TOOL_CALLS]{}", "weather[ARGS]ARGUMENTS"),
    ("[TOOL_CALLS][{}]", '{"name": "weather", "arguments": ARGUMENTS}'),
    ("{}", '{"name": "weather", "parameters": ARGUMENTS}'),
    ("<tool_call><function=weather><parameter=city>{}</parameter></function></tool_call>", "PLAIN"),
    ("<tool_call>weather<arg_key>city</arg_key><arg_value>{}</arg_value></tool_call>", "PLAIN"),
]


@pytest.mark.parametrize(("around", "call"), QUOTED)
@pytest.mark.parametrize(
    "value",
    ["}]) {[", "say </tool_call> now", "<tool_call>", "[TOOL_CALLS]", 'a "b" \\', "</tool_call>" * 3],
)  # fmt: skip
def test_what_a_text_of_a_call_contains_ends_nothing(around: str, call: str, value: str) -> None:
    arguments = json.dumps({"city": value})
    written = call.replace("ARGUMENTS", arguments).replace("PLAIN", value)
    text = around.format(written) if around != "{}" else written
    for pieces in ([text], list(text)):
        found = parsed(parser_of(USE, frozenset()), pieces)
        assert found == ("", "", [("weather", {"city": value})])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, (text, [])) for text in NO_CALLS),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}}</tool_call>', ("", ONE)),
        ('<tool_call>\n```json\n{"name": "clock"}\n```\n</tool_call>', ("", [("clock", {})])),
        ('<tool_call>{"name": "clock", "arguments": null}</tool_call>', ("", [("clock", {})])),
        ('<tool_call>{"name": "functions.clock"}</tool_call>', ("", [("clock", {})])),
        ('{"name": "weather", "parameters": {"city": "Rom"}}</tool_call>', ("", ONE)),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>',
            ("", [("weather", {"city": "a\nb"})]),
        ),
        (
            '<think>a <tool_call> now?</think>\n<tool_call>{"name": "clock"}</tool_call>',
            ("", [("clock", {})]),
        ),
        (
            '<tool_call>{"name": "wea</tool_call> no <tool_call>{"name": "clock"}</tool_call>',
            ('<tool_call>{"name": "wea</tool_call> no', [("clock", {})]),
        ),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d"}}</tool_call>',
            ("", [("weather", {"city": "?"})]),
        ),
    ],
)
def test_damaged_calls_are_read_as_far_as_they_are_clear(text: str, expected: Any) -> None:
    """And a text that is no call stays."""
    for pieces in ([text], list(text)):
        content, _, calls = parsed(parser_of(USE, frozenset()), pieces)
        assert (content, calls) == expected


def test_numbers_that_json_does_not_have_are_no_call() -> None:
    for number in ("NaN", "-Infinity", "1e999"):
        text = f'<tool_call>{{"name": "clock", "arguments": {{"a": {number}}}}}</tool_call>'
        assert parsed(parser_of(USE, frozenset()), [text]) == (text, "", [])
    text = "<function=weather><parameter=days>NaN</parameter></function>"
    assert parsed(parser_of(USE, frozenset()), [text])[2] == [("weather", {"days": "NaN"})]


def test_special_tokens_that_lead_no_call_are_left_out() -> None:
    special = frozenset({"<|python_tag|>", "[TOOL_CALLS]"})
    assert parsed(parser_of(USE, special), ["<|python_tag|>print(1)"])[0] == "print(1)"
    assert parsed(parser_of(USE, special), ["a [TOOL_CALLS]b"])[0] == "a b"


def special_codec(*names: str) -> TextCodec:
    """A tokenizer of bytes and of these special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([*names, "<|im_end|>"])
    return TextCodec(built.to_str().encode())


HARMONY = [
    (
        "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Hello!<|return|>",
        ("Hello!", "The user greets.", []),
    ),
    ("<|channel|>final<|message|>Hé<|return|>", ("Hé", "", [])),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Rom"}<|call|>',
        ("", "Hm.", ONE),
    ),
    (
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Rom"}<|call|><|start|>assistant to=functions.clock<|channel|>commentary'
        "<|message|>{}<|call|>",
        ("", "", TWO),
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather<|message|>{"city": "Rom"}<|call|>',
        ("I look.", "", ONE),
    ),
    ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", ("", "{}", [])),
    ('{"an": "answer"}', ('{"an": "answer"}', "", [])),
    ("goes on<|end|>", ("goes on", "", [])),
    ("<|channel|>analysis<|message|>cut off", ("", "cut off", [])),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_channels(text: str, expected: Any) -> None:
    codec = special_codec(*CHANNEL_MARKS)
    marks = marks_of(codec, USE)
    detokenizer = Detokenizer(codec, codec.special_ids(marks))
    pieces = [detokenizer.push(token) for token in codec.encode_rendered(text + "<|im_end|>")]
    pieces.append(detokenizer.flush())
    assert parsed(parser_of(USE, marks), pieces) == expected
    assert parsed(parser_of(USE, marks), list(text)) == expected
    assert parsed(parser_of(USE, marks), [text]) == expected


def test_special_tokens_are_shown_where_a_form_needs_them() -> None:
    codec = special_codec("[TOOL_CALLS]", "[ARGS]", "<s>")
    assert marks_of(codec, USE) == {"[TOOL_CALLS]", "[ARGS]"}
    assert marks_of(codec, ToolUse([], "none")) == frozenset()
    assert marks_of(None, USE) == frozenset()
    shown = codec.special_ids(CALL_MARKS)
    text = 'é[TOOL_CALLS]weather[ARGS]{"city": "Rom"}'
    detokenizer = Detokenizer(codec, shown)
    pieces = [detokenizer.push(token) for token in codec.encode_rendered("<s>" + text)]
    assert "".join(pieces) == text
    assert "".join(map(Detokenizer(codec).push, codec.encode_rendered(text))) == (
        'éweather{"city": "Rom"}'
    )


async def test_a_forced_call_streams_no_empty_events(serve: Serve) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with serve(MockTransport('{"city": "Rom"}'), chat_template=template) as served:
        stream = await served.openai.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "x"}], tools=[tool],
            tool_choice={"type": "function", "function": {"name": "weather"}}, stream=True,
        )  # fmt: skip
        deltas = [event.choices[0].delta async for event in stream]
    assert [bool(delta.tool_calls) for delta in deltas] == [False, True, False]
    assert deltas[0].role == "assistant"


class Harmony(MockTransport):
    def __init__(self, reply: Any) -> None:
        super().__init__(reply)
        self.tokenizer.add_special_tokens(sorted(CHANNEL_MARKS))
        self.json = self.tokenizer.to_str().encode()
