"""Thoughts: apart from the answer, as they come, in every form and whatever the tools are."""

from typing import Any

import pytest
from fakes.transport import MockTransport
from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.channels import CHANNEL_MARKS, parser_of
from paceline.gateway.requests import ChatRequest, ToolUse
from paceline.gateway.tool_calls import THOUGHTS, Part

from .conftest import Serve
from .test_call_forms import FORMS, TOOLS, USE, Harmony, parsed

TEMPLATE = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}{{ tools }}"
ASK = [{"role": "user", "content": "x"}]
NONE, NAMED = ToolUse([], "none"), ToolUse(TOOLS, "named", name="weather")


FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
FORMS_OF_THOUGHTS = [
    # What begins and ends a thought, and whether the template begins it.
    *((mark, end, opened) for mark, end in THOUGHTS.items() for opened in (True, False)),
    ("<|channel|>analysis<|message|>", FINAL, False),
]


@pytest.mark.parametrize(("mark", "end", "opened"), FORMS_OF_THOUGHTS)
async def test_a_thought_is_apart_from_the_answer(
    serve: Serve, mark: str, end: str, opened: bool
) -> None:
    """In chats and responses, whole and streamed, with and without tools."""
    reply = mark * (not opened) + f"\nHm. {{}}\n{end}\n\nNo.\n"
    tokens = len(mark) * (not opened) + len(f"\nHm. {{}}\n{end}")  # of a character each
    transport: MockTransport = MockTransport(reply)
    if end == FINAL:  # whose marks are tokens
        transport, tokens = Harmony(f"{mark}Hm. {{}}{end}No.\n"), len("Hm. {}") + 1
    flat: Any = {"type": "function", **TOOLS[0].function.model_dump()}
    template = TEMPLATE + f"{mark}\n" * opened
    async with serve(transport, chat_template=template) as served:
        for tools in ((), TOOLS):
            asked = {"messages": ASK, "tools": [tool.model_dump() for tool in tools]}
            status, _, whole = await served.post("/v1/chat/completions", **asked)
            message = whole["choices"][0]["message"]
            assert (status, message["content"]) == (200, "No.\n")
            assert message["reasoning_content"] == "Hm. {}"
            assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": tokens}

            options: Any = {"stream": True, "stream_options": {"include_usage": True}}
            answer: Any = await served.openai.chat.completions.create(
                model="mock", **asked, **options
            )
            events = [event async for event in answer]
            deltas = [choice.delta for event in events for choice in event.choices]
            assert "".join(delta.content or "" for delta in deltas) == "No.\n"
            thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
            assert "".join(thoughts) == "Hm. {}"
            assert tools or sum(map(bool, thoughts)) > 1  # beside tools parts may come together
            assert events[-1].usage.completion_tokens_details.reasoning_tokens == tokens

            response = await served.openai.responses.create(
                model="mock", input="x", tools=[flat] if tools else []
            )
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output[0].content[0].text == "Hm. {}"  # type: ignore[union-attr, index]
            assert response.output_text == "No.\n"
            assert response.usage
            assert response.usage.output_tokens_details.reasoning_tokens == tokens

        await served.post("/v1/chat/completions", messages=[*ASK, message, *ASK])
        assert "xHm. {}No.\nx" in bytes(served.transport.requests[-1].prompt_tokens).decode()


def test_an_effort_of_none_switches_thoughts_off() -> None:
    """Unless the caller sets the template's switch."""
    off = ChatRequest(messages=ASK, reasoning_effort="none")
    assert off.variables() == {"reasoning_effort": "none", "enable_thinking": False}
    on = ChatRequest(
        messages=ASK, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    )
    assert on.variables()["enable_thinking"]
    assert "enable_thinking" not in ChatRequest(messages=ASK, reasoning_effort="low").variables()


@pytest.mark.parametrize("use", [NONE, USE, NAMED], ids=["none", "auto", "named"])
def test_a_thought_that_does_not_end_is_no_answer(use: ToolUse) -> None:
    for text in ("<think>Hm", "<think>Hm.\n</thi", "<think>", "\n<think>\n\n"):
        content, thought, calls = parsed(parser_of(use, frozenset()), list(text))
        assert (content, calls) == ("", [])
        assert thought == text.strip().removeprefix("<think>")


@pytest.mark.parametrize(
    "text", ["Use <think>x</think>.", "a</think>b", "\n a \n", "<thin", "<div>", " ", "\n<think"]
)
@pytest.mark.parametrize("special", [(), THOUGHTS])
def test_marks_that_begin_no_thought_are_text(text: str, special: Any) -> None:
    """Without those that are special tokens."""
    for use in (NONE, USE):
        shown = text
        for mark in special:
            shown = shown.replace(mark, "")
        for pieces in ([text], list(text)):
            assert parsed(parser_of(use, frozenset(special)), pieces) == (shown, "", [])


PIECES = ["\n", " ", "Hm.", '{"a": 1}', "```json\n", "```", '{"name": "weather"', "["]
PIECES += ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "functools[", "weather"]
PIECES += [*THOUGHTS, *THOUGHTS.values(), *(text for text, _ in FORMS.values()), *CHANNEL_MARKS]


def joined(parts: list[Part]) -> list[Any]:
    """Parts without ids of calls, where neighbours of one kind are one."""
    found: list[Any] = []
    for part in parts:
        kind = type(part).__name__
        text = part if isinstance(part, str) else getattr(part, "text", None)
        if text is not None and found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, getattr(part, "arguments", text), getattr(part, "name", None)))
    return [each[:2] if each[0] != "Call" else each for each in found]


@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.sampled_from([NONE, USE, NAMED]),
    st.sampled_from(["", "</think>"]),
    st.sampled_from([frozenset(), CHANNEL_MARKS]),
)
def test_any_split_of_a_text_gives_the_same_parts(
    text: str, sizes: list[int], use: ToolUse, thought: str, marks: frozenset[str]
) -> None:
    whole, split = (parser_of(use, marks, thought) for _ in range(2))
    expected = joined(whole.push(text) + whole.flush())
    parts: list[Part] = []
    at = 0
    for size in sizes:
        parts += split.push(text[at : at + size])
        at += size
    parts += split.push(text[at:]) + split.flush()
    assert joined(parts) == expected
    assert split.thoughts == whole.thoughts
    if not whole.calls and not whole.thoughts and not marks:
        assert "".join(part for part in parts if isinstance(part, str)) == text
