"""Answers with a format beside tools: it binds the answer, and leaves calls and thoughts free."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from fakes.transport import MockTransport
from llguidance import LLMatcher, LLTokenizer

from paceline.client import TextCodec
from paceline.gateway.channels import CHANNEL_MARKS, grammar_beside_calls, marks_of, parser_of
from paceline.gateway.requests import ChatRequest, ToolUse
from paceline.gateway.tool_calls import BLOCKS, CALL_MARKS, THOUGHT_MARKS, THOUGHTS

from .conftest import Serve
from .test_call_forms import FORMS, HARMONY, TOOLS, parsed, special_codec

USE = ToolUse(TOOLS, "auto", bound=True)
SCHEMA = {
    "type": "object",
    "properties": {"celsius": {"type": "number"}},
    "required": ["celsius"],
    "additionalProperties": False,
}
ANSWERS = ['{"celsius": 3}', '{\n  "celsius": -1.5\n}']
TOKENS = [(), (*sorted(CALL_MARKS | THOUGHT_MARKS),), (*sorted(CHANNEL_MARKS),)]
EXPLAINED = " ".join((*BLOCKS, *THOUGHTS))


def accepted(
    codec: TextCodec,
    texts: Sequence[str],
    thought: str = "",
    prompt: str = EXPLAINED,
    **constraint: Any,
) -> list[bool]:
    """Whether each text is one of the grammar that the gateway sends."""
    (end,) = codec.encode_rendered("<|im_end|>")
    constraint = constraint or {"json_schema": SCHEMA}
    lark = grammar_beside_calls(USE, constraint, codec, [end], prompt, thought)
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


@pytest.mark.parametrize("tokens", TOKENS[:2], ids=["texts", "tokens"])
@pytest.mark.parametrize("thought", ["", *THOUGHTS])
def test_a_format_leaves_calls_in_every_form_and_thoughts_free(
    tokens: tuple[str, ...], thought: str
) -> None:
    codec = special_codec(*tokens)
    calls = [text for text, _ in FORMS.values()]
    before = f"{thought}It {{}} <is>.{THOUGHTS[thought]}\n\n" if thought else ""
    assert all(accepted(codec, [before + each for each in [*calls, *ANSWERS]]))
    others = ["It is", "", '{"fahrenheit": 3}', '{"celsius": 3} x', '{"name": "other"}', "3"]
    assert not any(accepted(codec, [before + each for each in others]))
    if thought:
        rest = before.removeprefix(thought)
        assert all(accepted(codec, [rest + each for each in ANSWERS], THOUGHTS[thought]))
        assert not any(accepted(codec, [*others, *ANSWERS, *calls], THOUGHTS[thought]))
    for text, (_, expected) in zip(calls, FORMS.values(), strict=True):
        for pieces in ([before + text], list(before + text)):
            content, thoughts, found = parsed(parser_of(USE, frozenset(tokens)), pieces)
            assert (content, found) == ("", expected)
            assert thoughts == ("It {} <is>." if thought else "")
    for text, pieces in product(ANSWERS, (1, 99)):
        whole = before + text
        cut = [whole[at : at + pieces] for at in range(0, len(whole), pieces)]
        assert parsed(parser_of(USE, frozenset(tokens)), cut)[0] == text


def test_a_format_leaves_channels_free() -> None:
    codec = special_codec(*CHANNEL_MARKS)
    thought = "<|channel|>analysis<|message|>Hm. {}<|end|><|start|>assistant"
    final = "<|channel|>final <|constrain|>json<|message|>"
    for before in ("", thought, thought * 2):
        calls = [before + text.removeprefix("<|start|>assistant") for text, _ in CALLS]
        assert all(accepted(codec, calls))
        assert all(accepted(codec, [before + final + each for each in ANSWERS]))
        assert not any(accepted(codec, [before + final + "It is 3.", before + "Three"]))
        found = parsed(parser_of(USE, marks_of(codec, USE)), [before + final + ANSWERS[0]])
        assert found == (ANSWERS[0], "Hm. {}" * before.count("analysis"), [])


CALLS = [each for each in HARMONY if each[1][2] and not each[1][0] and not each[1][1]]


def test_marks_that_are_not_the_models_begin_nothing() -> None:
    """Else a model that wants to write tags would begin with whatever is near to them."""
    own = FORMS["hermes"][0], FORMS["llama 3"][0], FORMS["llama 3.2"][0], *ANSWERS
    others = FORMS["granite"][0], FORMS["olmo 3"][0], "<think>x</think>{}"
    for tokens in ((), ("<tool_call>", "</tool_call>")):
        codec = special_codec(*tokens)
        assert all(accepted(codec, own, prompt="x"))
        assert not any(accepted(codec, others, prompt="x"))


def test_a_regular_expression_beside_calls() -> None:
    codec = special_codec()
    texts = ["a/b", 'a"\n', "c", FORMS["hermes"][0], "ab"]
    found = accepted(codec, texts, regex='a/b|a\\/c|a"\n|(?:c)')
    assert found == [True, True, True, True, False]


TOOL: dict[str, Any] = TOOLS[0].model_dump()
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
PROMPT = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


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
    reply = '{"city": "Rom"}' if isinstance(choice, dict) else '[{"name": "weather"}]'
    async with serve(MockTransport(reply), chat_template=PROMPT + opened) as served:
        status, _, body = await served.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **asked
        )
        if bound and choice not in ("auto", "none"):
            assert (status, body["error"]["param"]) == (400, "tool_choice")
            return
        assert status == 200
        sampling = served.transport.requests[-1].sampling
        if choice == "auto" and bound and form != "grammar":
            assert not sampling.json_schema
            assert ("thought (" in sampling.grammar) == bool(opened)
        else:
            assert bool(sampling.json_schema) == (
                choice not in ("auto", "none") or (bound and form != "grammar")
            )
            assert sampling.grammar == ('start: "a"' if form == "grammar" else "")
        if choice not in ("auto", "none"):
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


def test_a_format_that_is_no_json_is_refused() -> None:
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "guided_json": "{"}
    )
    with pytest.raises(Exception, match="no JSON"):
        accepted(special_codec(), [], **request.constraint())
