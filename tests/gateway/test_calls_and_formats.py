"""Grammars of answers: calls that fit their tools, a format for the answer, and free thoughts."""

from collections.abc import Sequence
from typing import Any

import pytest
from fakes.transport import MockTransport
from llguidance import LLMatcher, LLTokenizer

from paceline.client import TextCodec
from paceline.gateway.answer_grammar import answer_grammar
from paceline.gateway.channels import CHANNEL_MARKS, marks_of, parser_of
from paceline.gateway.requests import ChatRequest, Function, Tool, ToolUse
from paceline.gateway.tool_calls import BLOCKS, CALL_MARKS, THOUGHT_MARKS, THOUGHTS

from .conftest import Serve
from .test_call_forms import FORMS, HARMONY, PROMPT, TOOLS, parsed, special_codec

USE = ToolUse(TOOLS, "auto")
SCHEMA = {
    "type": "object",
    "properties": {"celsius": {"type": "number"}},
    "required": ["celsius"],
    "additionalProperties": False,
}
ANSWERS = ['{"celsius": 3}', '{\n  "celsius": -1.5\n}']
FREE = ["", "It is <b>3</b>.", '{"celsius": 3}']


def accepted(
    codec: TextCodec,
    texts: Sequence[str],
    thought: str = "",
    prompt: str = "",
    *,
    use: ToolUse = USE,
    budget: int | None = None,
    **constraint: Any,
) -> list[bool]:
    """Whether each text is one of the grammar that the gateway sends."""
    (end,) = codec.encode_rendered("<|im_end|>")
    lark = answer_grammar(use, constraint, codec, [end], prompt, thought, budget)
    assert lark
    tokenizer = LLTokenizer(codec._tokenizer.to_str(), eos_token=[end])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = []
    for text in texts:
        tried, tokens = matcher.deep_copy(), codec.encode_rendered(text)
        count = tried.validate_tokens(tokens)
        tried.try_consume_tokens(tokens[:count])
        found.append(count == len(tokens) and tried.is_accepting())
    return found


def marks_in(text: str) -> list[str]:
    """Marks of calls that a text has."""
    return sorted(mark for mark in CALL_MARKS | {*BLOCKS} if mark in text)


BOUND = {"json_schema": SCHEMA}
OTHERS = ["It is", "", '{"fahrenheit": 3}', '{"celsius": 3} x', '{"name": "other"}', "3"]


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_calls_in_every_form_beside_an_answer(form: str, as_tokens: bool) -> None:
    """That is free, or has a format; the marks are texts of the prompt, or tokens."""
    text, expected = FORMS[form]
    own = marks_in(text)
    for mark, end in {
        "": "",
        **(THOUGHTS if form == "hermes" else {"[THINK]": "[/THINK]"}),
    }.items():
        tokens = [*own, *THOUGHT_MARKS] if as_tokens else []
        codec = special_codec(*(each for each in tokens if each != "<function="))
        before, prompt = f"{mark}It {{}} <is>.{end}\n\n" if mark else "", " ".join([*own, mark])
        assert all(accepted(codec, [before + text], prompt=prompt, **BOUND))
        assert all(accepted(codec, [before + each for each in ANSWERS], prompt=prompt, **BOUND))
        assert not any(accepted(codec, [before + each for each in OTHERS], prompt=prompt, **BOUND))
        if mark:
            rest = before.removeprefix(mark)
            assert all(accepted(codec, [rest + each for each in ANSWERS], end, **BOUND))
            assert not any(accepted(codec, [*OTHERS, *ANSWERS, text], end, **BOUND))
        if own and own != ["<|python_tag|>"] and "<function_calls>" not in own:
            said = "I look.\n" if mark in prompt else ""
            free = [before + said + text, *(before + each for each in FREE)]
            assert all(accepted(codec, free, prompt=prompt))
        for pieces in ([before + text], list(before + text)):
            content, thoughts, calls = parsed(parser_of(USE, frozenset(tokens)), pieces)
            assert (content, calls) == ("", expected)
            assert thoughts == ("It {} <is>." if mark else "")


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_arguments_fit_from_the_first_token_of_a_form_on(form: str, as_tokens: bool) -> None:
    text, calls = FORMS[form]
    own = marks_in(text)
    if not own or "<|python_tag|>" in own or "<function_calls>" in own:
        return  # calls without a mark, and those in Python
    codec = special_codec(*(each for each in own if as_tokens and each != "<function="))
    damaged = [text.replace("weather", "other"), text.replace("Rom", "Rom", 1)[:-1] + "x"]
    damaged += [
        text.replace("city", "town"),
        text.replace('"Rom"', "3"),
        text.replace("3\n", "x\n"),
    ]
    damaged += [text.replace("<arg_value>3", "<arg_value>x"), f"I look.\n{own[0]} no"]
    for bad in {*damaged} - {text}:
        if bad[:-1] == text[:-1] or (bad == f"I look.\n{own[0]} no" and own[0] not in BLOCKS):
            continue
        assert accepted(codec, [bad], prompt=" ".join(own)) == [False], bad
    assert calls


BEGUN = "<|start|>assistant"


def test_channels_and_formats() -> None:
    codec = special_codec(*CHANNEL_MARKS)
    thought = "<|channel|>analysis<|message|>Hm. {}<|end|><|start|>assistant"
    final = "<|channel|>final <|constrain|>json<|message|>"
    for before in ("", thought, thought * 2):
        calls = [before + text.removeprefix("<|start|>assistant") for text, _ in CALLS]
        assert all(accepted(codec, calls, prompt=BEGUN, **BOUND))
        assert all(
            accepted(codec, [before + final + each for each in ANSWERS], prompt=BEGUN, **BOUND)
        )
        others = [before + final + "It is 3.", before + "Three"]
        assert not any(accepted(codec, others, prompt=BEGUN, **BOUND))
        said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        free = [*calls, before + said + calls[0].removeprefix(before), before + final + "It is 3."]
        assert all(accepted(codec, free, prompt=BEGUN))
        damaged = [each.replace("Rom", 'Rom", "town": "x') for each in calls if "Rom" in each]
        damaged += [each.replace("weather", "other") for each in calls]
        assert not any(accepted(codec, damaged, prompt=BEGUN))
        found = parsed(parser_of(USE, marks_of(codec, USE)), [before + final + ANSWERS[0]])
        assert found == (ANSWERS[0], "Hm. {}" * before.count("analysis"), [])


CALLS = [each for each in HARMONY if each[1][2] and not each[1][0] and not each[1][1]]


def test_marks_that_are_not_the_models_begin_nothing() -> None:
    """Else a model that wants to write tags would begin with whatever is near to them."""
    own = FORMS["hermes"][0], FORMS["llama 3"][0], FORMS["llama 3.2"][0], *ANSWERS
    others = FORMS["granite"][0], FORMS["olmo 3"][0], "<think>x</think>{}"
    for tokens in ((), ("<tool_call>", "</tool_call>")):
        codec = special_codec(*tokens)
        assert all(accepted(codec, own, **BOUND))
        assert not any(accepted(codec, others, **BOUND))
    assert answer_grammar(USE, {}, special_codec(), [1], "x") == ""


def test_a_regular_expression_beside_calls() -> None:
    texts = ["a/b", 'a"\n', "c", FORMS["hermes"][0], "ab"]
    found = accepted(special_codec(), texts, regex='a/b|a\\/c|a"\n|(?:c)')
    assert found == [True, True, True, True, False]


@pytest.mark.parametrize(("mark", "end"), THOUGHTS.items())
def test_a_budget_ends_a_thought_with_its_mark(mark: str, end: str) -> None:
    none = ToolUse([], "none")
    codec = special_codec(*sorted(THOUGHT_MARKS))
    for use in (none, USE):
        for budget in (0, 3):
            thoughts = ["", "ab", "abc", "abcd"]
            good = [len(each) <= budget for each in thoughts]
            texts = [f"{each}{end}No <b>." for each in thoughts]
            assert accepted(codec, texts, end, use=use, budget=budget) == good
            texts = [mark + each for each in texts]
            assert accepted(codec, texts, use=use, budget=budget) == good
        assert all(accepted(codec, ["No.", "a" * 9], use=use, budget=1))
    with pytest.raises(Exception, match="needs one that ends thoughts"):
        accepted(special_codec(), [], end, use=none, budget=1)
    channels = special_codec(*CHANNEL_MARKS)
    begin = "<|channel|>analysis<|message|>"
    final = "<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>"
    texts = [f"{begin}{each}{final}" for each in ("", "abc", "abcd")]
    assert accepted(channels, texts, prompt=BEGUN, use=none, budget=3) == [True, True, False]


ODD: list[dict[str, Any]] = [
    {"pattern": "(?=a)b"},
    {"pattern": "(a"},
    {"pattern": r"^\bB"},
    {"$ref": "https://example.org/a"},
    {"not": {"type": "null"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"oneOf": [{"type": "string"}, {"minLength": 2}]},
    {"type": "array", "uniqueItems": True},
    {"format": "binary"},
    {"type": "object", "patternProperties": {"^(?!a)": {}}, "additionalProperties": False},
    # Of careless programs.
    {"type": "any"},
    {"type": ["string", None]},
    {"type": []},
    {"enum": "x"},
    {"enum": []},
    {"type": "integer", "minimum": "0"},
    {"type": "string", "maxLength": True},
    {"type": "object", "properties": ["x"]},
    {"type": "object", "properties": {"x": "string"}},
    {"type": "array", "items": "string"},
    {"type": "object", "required": "x"},
    {"$ref": "#/$defs/missing"},
]


@pytest.mark.parametrize("schema", ODD)
def test_what_grammars_lack_is_not_enforced(schema: dict[str, Any]) -> None:
    """Rather than refused: such tools can be called too."""
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}}
    use = ToolUse([Tool(function=Function(name="f", parameters=parameters))], "auto")
    texts = [
        f'<tool_call>{{"name": "f", "arguments": {{"b": {b}}}}}</tool_call>' for b in ("1", '""')
    ]
    for codec in (special_codec(), special_codec("<tool_call>", "</tool_call>")):
        assert accepted(codec, texts, prompt="<tool_call>", use=use) == [True, False]


TOOL: dict[str, Any] = TOOLS[0].model_dump()
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("choice", ["auto", "required", "none", {"function": {"name": "weather"}}])
@pytest.mark.parametrize(
    "form", [None, FORMAT, {"type": "json_object"}, {"type": "text"}, "grammar"]
)
@pytest.mark.parametrize("opened", ["", "<think>\n"])
async def test_each_choice_of_tools_with_each_format(
    serve: Serve, choice: Any, form: Any, opened: str
) -> None:
    """What binds the text, in chats and responses."""
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice}
    if form == "grammar":
        asked["grammar"] = 'start: "a"'
    elif form:
        asked["response_format"] = form
    bound = form not in (None, {"type": "text"})
    forced = choice not in ("auto", "none")
    binds = forced or (bound and form != "grammar")
    reply = '{"city": "Rom"}' if isinstance(choice, dict) else '[{"name": "weather"}]'
    reply = "</think>" * bool(opened and binds) + reply
    async with serve(MockTransport(reply), chat_template=PROMPT + opened) as served:
        status, _, body = await served.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **asked
        )
        if bound and forced:
            assert (status, body["error"]["param"]) == (400, "tool_choice")
            return
        assert status == 200
        sampling = served.transport.requests[-1].sampling
        if binds and (opened or choice == "auto"):
            assert not sampling.json_schema
            assert ("thought: (" in sampling.grammar) == bool(opened)
        else:
            assert bool(sampling.json_schema) == binds
            assert sampling.grammar == ('start: "a"' if form == "grammar" else "")
        if forced:
            assert body["choices"][0]["finish_reason"] == "tool_calls"
        if form == FORMAT:
            flat = {"type": "function", **TOOL["function"]}
            text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
            status, _, _ = await served.post(
                "/v1/responses", input="x", tools=[flat], text=text, tool_choice=choice
            )
            assert status == 200
            same = served.transport.requests[-1].sampling
            assert (same.json_schema, same.grammar) == (sampling.json_schema, sampling.grammar)


async def test_an_answer_beside_tools_has_its_thoughts_apart(serve: Serve) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    asked["response_format"] = FORMAT
    for opened, reply in (("", "<think>Hm."), ("<think>\n", "Hm.")):
        for text, calls in (('{"celsius": 3}', 0), (FORMS["hermes"][0], 1)):
            transport = MockTransport(f"{reply}</think>\n\n{text}")
            async with serve(transport, chat_template=PROMPT + opened) as served:
                _, _, body = await served.post("/v1/chat/completions", **asked)
            message = body["choices"][0]["message"]
            assert message["reasoning_content"] == "Hm."
            assert message["content"] == (None if calls else text)
            assert len(message.get("tool_calls", ())) == calls


async def test_marks_that_messages_quote_are_no_form_of_the_model(serve: Serve) -> None:
    for template, armed in ((PROMPT, False), (f"<tool_call>{PROMPT}", True)):
        async with serve(MockTransport("Hm."), chat_template=template) as served:
            asked = [{"role": "user", "content": "What is <tool_call>?"}]
            _, _, body = await served.post("/v1/chat/completions", messages=asked, tools=[TOOL])
            assert body["choices"][0]["message"]["content"] == "Hm."
            assert bool(served.transport.requests[-1].sampling.grammar) == armed

    # Calls, tools and parts of messages quote too, and templates print them as JSON.
    quoting = 'Write "<tool_call>",\n<think> or <|tool_call|>.'
    call = {"id": "a", "function": {"name": "weather", "arguments": {"city": quoting}}}
    asked = [
        {"role": "user", "content": [{"type": "text", "text": each} for each in ("x", quoting)]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    function = {**TOOL["function"], "description": quoting}
    template = "{{ tools | tojson }}{{ messages | tojson }}{{ messages[0].content[1].text }}"
    async with serve(MockTransport("Hm."), chat_template=template) as served:
        tools = [{"type": "function", "function": function}]
        for budget in (None, 3):
            status, _, body = await served.post(
                "/v1/chat/completions", messages=asked, tools=tools, thinking_token_budget=budget
            )
            assert (status, served.transport.requests[-1].sampling.grammar) == (200, ""), body


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": {f"a{i}": {"type": "integer"} for i in range(300)}}, "more than"),
        (
            {"$id": "http://a/", "properties": {"a": {"$id": "http://["}}},
            "cannot be read as a JSON schema",
        ),
    ],
)
async def test_schemas_that_make_no_grammar(
    serve: Serve, parameters: dict[str, Any], said: str
) -> None:
    """It leaves calls free, or is refused beside what must be bound."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    template = f"<tool_call> <function= {PROMPT}"
    async with serve(MockTransport("Hm."), chat_template=template) as served:
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
        for bound in ({}, {"response_format": FORMAT}):
            status, headers, body = await served.post("/v1/chat/completions", **asked, **bound)
            if status == 200:
                assert said in headers["x-paceline-warning"]
            else:
                assert (status, body["error"]["param"]) == (400, "tools")
                assert said in body["error"]["message"]
            assert status == 400 or not bound


def test_a_format_that_is_no_json_is_refused() -> None:
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "guided_json": "{"}
    )
    with pytest.raises(Exception, match="no JSON"):
        accepted(special_codec(), [], **request.constraint())
