"""Chat templates: each prompt is that of transformers, and nothing vanishes from it."""

import contextlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from paceline.client import InvalidRequestError, Model, render_chat
from paceline.client._templates import Prompt
from paceline.v1 import verifier_pb2

reference = pytest.importorskip("transformers.utils.chat_template_utils")

# The constructs of published chat templates, one small template for each family of models, written
# for these tests: how tools, calls, results and system messages are told, and what is refused.
SHAPES = {
    file.stem: file.read_text("utf-8").removesuffix("\n")
    for file in sorted((Path(__file__).parent / "shapes").glob("*.jinja"))
}
CHATML = SHAPES["CHATML"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für einen Ort",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a <place>"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "description": "", "parameters": {
        "type": "object", "properties": {"zones": {"type": "array", "items": {"type": "string"}}}
    }}},
]  # fmt: skip
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "exact": True}


def call(index: int = 0) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": ARGUMENTS}
    return {"id": f"callcall{index}", "type": "function", "function": function}


def result(index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"callcall{index}", "name": "get_weather",
            "content": f"sunny{index}"}  # fmt: skip


SYSTEM = {"role": "system", "content": "Be brief. "}
ASK = {"role": "user", "content": " What is <it>? é\n"}
ANSWER = {"role": "assistant", "content": "That.\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, ANSWER, ASK],
    "two questions": [ASK, ASK],
    "thoughts": [ASK, {**ANSWER, "content": "<think>hm</think>\nThat."}, ASK],
    "calls": [ASK, {"role": "assistant", "content": "I look.", "tool_calls": [call()]}, result()],
    "calls without content": [SYSTEM, ASK, {"role": "assistant", "tool_calls": [call()]}, result()],
    "calls with empty content": [
        ASK, {"role": "assistant", "content": "", "tool_calls": [call()]}, result(), ANSWER, ASK,
    ],
    "two calls": [
        ASK, {"role": "assistant", "tool_calls": [call(), call(1)]}, result(), result(1),
    ],
    "thoughts of a call": [
        ASK,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call()]},
        result(),
    ],
}  # fmt: skip


def model_of(template: str, **named: str) -> Model:
    facts = verifier_pb2.GetModelResponse(name="m", chat_template=template, special_tokens=SPECIAL)
    facts.named_chat_templates.update(named)
    return Model(facts, None)


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> Prompt:
    return render_chat(model_of(template), sent(messages), **options)


def sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them: arguments are text."""
    copied: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in copied:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(
                each["function"]["arguments"], ensure_ascii=False
            )
    return copied


def expected(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": True, "tools": None, **options}
    found, _ = reference.render_jinja_template(
        [messages], chat_template=template, **SPECIAL, **options
    )
    return str(found[0])


def references(template: str, messages: list[dict[str, Any]], **options: Any) -> Iterator[str]:
    """Prompts of the same conversation in each form that a template may take; or its refusals."""
    for form, content in product((messages, sent(messages)), ("as it is", None, "", "missing")):
        text = json.dumps(form)
        given: list[dict[str, Any]] = json.loads(text)
        for message in given:
            if not message.get("content") and content != "as it is":
                message.pop("content", None)
                if content != "missing":
                    message["content"] = content
        try:
            yield expected(template, given, **options)
        except Exception as error:
            yield f"refused: {error}"


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_prompt_is_that_of_transformers(family: str, conversation: str) -> None:
    """Or, where a template leaves messages, tools or calls out, a prompt that has them."""
    template, messages = SHAPES[family], CONVERSATIONS[conversation]
    has_calls = any("tool_calls" in message for message in messages)
    for tools, begin in product((None, TOOLS), (True, False)):
        names = [tool["function"]["name"] for tool in tools or ()] + ["Zürich"] * has_calls
        names += [m.get("content", "").split("</think>")[-1].strip() for m in messages]
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": begin}
        wanted = list(references(template, messages, **options))
        try:
            found = rendered(template, messages, **{**options, "tools": tools or ()})
        except InvalidRequestError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert all(each.startswith("refused") for each in wanted)
            assert any(each.removeprefix("refused: ") in refusal for each in wanted)
            continue
        complete = [
            each for each in wanted
            if not each.startswith("refused") and all(name in each for name in names)
            and "'city'" not in each
        ]  # fmt: skip
        if family == "GPT_OSS" and conversation == "two calls":  # it shows the first of several
            first = [ASK, *CONVERSATIONS["calls without content"][2:]]
            second = [{"role": "assistant", "tool_calls": [call(1)]}, result(1)]
            assert found in list(references(template, first + second, **options))
        elif complete:
            assert found in complete
        else:
            shown = found.replace("\\u00fc", "ü")
            assert all(name in shown for name in names)


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(
    "text", ["```python\n", "The answer is ", "1. a\n2.", "  x", "\n", "", "a\n\n", "x</think>y "]
)
def test_the_last_message_is_continued_as_transformers_does(family: str, text: str) -> None:
    template = SHAPES[family]
    messages = [ASK, {"role": "assistant", "content": text}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    try:
        wanted = expected(template, messages, **options)
    except Exception:
        with contextlib.suppress(InvalidRequestError):  # or in an arrangement that it takes
            assert rendered(template, messages, continue_final_message=True).endswith(text)
        return
    assert rendered(template, messages, continue_final_message=True) == wanted


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_lists_of_parts(family: str, role: str) -> None:
    """Either the template shows the texts of a list, or it gets one text."""
    template = SHAPES[family]
    messages: list[dict[str, Any]] = {
        "system": [SYSTEM, ASK],
        "user": [ASK],
        "assistant": [ASK, ANSWER, ASK],
        "tool": [ASK, CONVERSATIONS["calls"][1], result(), ANSWER, ASK],
    }[role]
    index = next(i for i, message in enumerate(messages) if message["role"] == role)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    changed = [*messages[:index], {**messages[index], "content": parts}, *messages[index + 1 :]]
    prompt = rendered(template, changed)
    assert "one" in prompt
    assert "two" in prompt
    assert "'text':" not in prompt
    assert '"text":' not in prompt
    if role == "user" and family in ("MISTRAL_SMALL3", "GEMMA3", "QWEN35"):
        assert prompt == expected(template, changed)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"enable_thinking": False}, {}),
        ({"enable_thinking": True}, {}),
        ({"thinking": True, "reasoning_effort": "high"}, {}),
        ({"bos_token": "<other>", "controls": {"b": 1, "a": 2}}, {}),
        ({}, {"documents": [{"title": "a", "text": "The text."}]}),
    ],
)
def test_variables_of_templates(values: dict[str, Any], options: dict[str, Any]) -> None:
    for template in SHAPES.values():
        try:
            merged = {**SPECIAL, **values, **options}
            wanted, _ = reference.render_jinja_template(
                [[ASK]], chat_template=template, tools=None, add_generation_prompt=True, **merged
            )
        except Exception:
            continue
        assert rendered(template, [ASK], variables=values, **options) == wanted[0]


def test_thoughts_of_a_call_are_shown_as_templates_want_them() -> None:
    marks = {"QWEN3": "<think>\nhm\n</think>", "GPT_OSS": "<|channel|>analysis<|message|>hm<|end|>"}
    messages = [ASK, *CONVERSATIONS["thoughts of a call"][1:]]
    for family, shown in {**marks, "DEEPSEEK_R1": ""}.items():
        prompt = rendered(SHAPES[family], messages, tools=TOOLS)
        assert (shown or "get_weather") in prompt
        assert ("hm" in prompt) == bool(shown)


def test_a_template_is_chosen_by_name() -> None:
    model = model_of("default:{{ messages[0].content }}", tool_use="tools:{{ tools | tojson }}",
                     rag="rag:{{ documents[0].text }}")  # fmt: skip
    messages = [{"role": "user", "content": "x"}]
    assert render_chat(model, messages) == "default:x"
    assert render_chat(model, messages, tools=TOOLS).startswith("tools:[{")
    documents = [{"text": "found"}]
    assert render_chat(model, messages, template="rag", documents=documents) == "rag:found"
    assert render_chat(model, messages, template="own:{{ messages[0].content }}") == "own:x"
    with pytest.raises(InvalidRequestError, match="rag"):
        render_chat(model_of("", rag="x"), messages)


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token is defined }}"
    assert rendered(template, [ASK]) == "<s></s><image>False"


def test_arguments_that_are_no_object_stay_text() -> None:
    broken = call()
    broken["function"] = {"name": "get_weather", "arguments": '{"city": '}
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [broken]}, result()]
    assert r'"arguments": "{\"city\": "' in render_chat(model_of(CHATML), messages)


# The last system message replaces the first, as for DeepSeek R1, and tools are not shown.
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endfor %}{{ ns.system }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("messages", [[SYSTEM, SYSTEM, ASK], [ASK, ANSWER, SYSTEM, ASK]])
def test_tools_are_told_where_a_later_system_message_replaces_the_first(
    messages: list[dict[str, Any]],
) -> None:
    prompt = rendered(LAST_SYSTEM, messages, tools=TOOLS)
    assert "Be brief. " in prompt
    assert "You may call functions." in prompt
    assert all(tool["function"]["name"] in prompt for tool in TOOLS)


# Calls of the last message are shown only where no answer begins, as for Nemotron Nano 2.
FINISHED_CALLS = (
    "[{{ tools | tojson }}]{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if not (loop.last and add_generation_prompt) %}{% for call in m.tool_calls or [] %}"
    "{{ call.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("begin", [True, False])
def test_calls_that_are_not_shown_change_nothing_else(begin: bool) -> None:
    messages = [ASK, {"role": "assistant", "content": "I look.", "tool_calls": [call()]}]
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": begin}
    prompt = rendered(FINISHED_CALLS, messages, **options)
    wanted = expected(FINISHED_CALLS, messages, **options)
    assert prompt.startswith(wanted)
    assert ("<tool_call>" in prompt) is begin
    assert begin or prompt == wanted


WORDS = ["alpha words", "beta words", "gamma words", "delta words", "omega words"]
S, D, U, A = ({"role": role} for role in ("system", "developer", "user", "assistant"))
C: dict[str, Any] = {"role": "assistant", "tool_calls": [call()]}
T: dict[str, Any] = {"role": "tool", "tool_call_id": "callcall0"}
ORDERS: dict[str, list[dict[str, Any]]] = {
    "two system messages": [S, S, U],
    "developer": [D, U],
    "system and developer": [S, D, U],
    "later system message": [S, U, A, S, U],
    "system message last": [U, A, U, S],
    "system message alone": [S],
    "later developer, no first": [U, A, D, U],
    "two users": [S, U, U],
    "three users, no system": [U, U, U],
    "two assistants": [S, U, A, A, U],
    "assistant first": [A, U],
    "assistant first, after system": [S, A, U],
    "assistant alone": [A],
    "call without result": [S, U, C, U],
    "call without result, answered": [U, C, A, U],
    "result, then user": [S, U, C, T, U],
    "result, then system": [S, U, C, T, D],
    "result without call": [U, T, U],
    "result first": [T, U],
    "text beside a call": [S, U, {**C, **A, "content": "x"}, T],
    "names": [{**S, "name": "a"}, {**U, "name": "b"}, {**A, "name": "c"}, {**U, "name": "d"}],
}


def filled(order: list[dict[str, Any]], parts: bool) -> tuple[list[dict[str, Any]], list[str]]:
    messages, words = [], []
    for message, text in zip(order, WORDS, strict=False):
        if "tool_calls" in message and "content" not in message:
            messages.append(message)
            continue
        words.append(text)
        content: Any = [{"type": "text", "text": text}] if parts else text
        messages.append({**message, "content": content})
    return messages, words


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_no_message_is_lost_in_any_order(family: str, order: str) -> None:
    """Neither its text nor its calls, with content as text or as a list of parts."""
    has_calls = any("tool_calls" in message for message in ORDERS[order])
    plain = not has_calls and all(message["role"] != "tool" for message in ORDERS[order])
    tools = TOOLS if has_calls else []
    for parts in (False, True):
        messages, words = filled(ORDERS[order], parts)
        found = render_chat(model_of(SHAPES[family]), sent(messages), tools=tools)
        assert [word for word in words if word not in found] == []
        assert not has_calls or "Zürich" in found.replace("\\u00fc", "ü")
        # What the template shows as it is stays as it is.
        try:
            wanted = expected(
                SHAPES[family],
                [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages],
                tools=tools or None,
            )
        except Exception:
            wanted = ""
        if plain and not found.changes:
            assert parts or wanted in ("", found)
        elif plain:
            assert any(word not in wanted for word in words)


def test_what_is_done_to_messages_is_said() -> None:
    later = [{**S, "content": "one"}, {**U, "content": "two"}, {**D, "content": "three"}]
    assert rendered(SHAPES["GPT_OSS"], later).changes == (
        "system messages were merged into the first one"
    )
    assert "one\n\nthree" in rendered(SHAPES["GPT_OSS"], later)
    mixtral = rendered(SHAPES["MIXTRAL"], later)
    assert mixtral == "<s>[INST] one\n\ntwo\n\nthree [/INST]"
    assert mixtral.changes == (
        "system messages became the user's; "
        "turns were merged or added so that user and assistant alternate"
    )
    assert rendered(SHAPES["PHI3"], later).changes == ""
    assert rendered(SHAPES["ZEPHYR"], later).changes == ""


def test_a_template_that_shows_no_arrangement_says_how_many_it_leaves_out() -> None:
    last = rendered("{{ messages[-1].content }}", [SYSTEM, ASK, ANSWER, ASK])
    assert last == ASK["content"]
    assert "the chat template leaves out 3 of the messages" in last.changes
    with pytest.raises(InvalidRequestError, match="never"):
        rendered("{{ raise_exception('never') }}", [SYSTEM, ASK])


def test_messages_without_content_or_role() -> None:
    for family in SHAPES:
        prompt = rendered(SHAPES[family], [{"role": "system"}, ASK], tools=TOOLS)
        assert all(tool["function"]["name"] in prompt for tool in TOOLS)
    for wrong in ({"content": "x"}, {"role": "user", "content": 1}, {**C, "tool_calls": [{}]}):
        with pytest.raises(InvalidRequestError, match="form of OpenAI's API"):
            render_chat(model_of(CHATML), [wrong])


def test_calls_that_a_template_refuses_become_text() -> None:
    messages = [ASK, {"role": "assistant", "tool_calls": [{**call(), "id": "x" * 29}]}, result()]
    prompt = rendered(SHAPES["MISTRAL_V3"], messages, tools=TOOLS)
    assert '<tool_call>\n{"name": "get_weather"' in prompt
    assert prompt.changes == "calls became text"


def test_a_refusal_has_the_words_of_the_template() -> None:
    with pytest.raises(InvalidRequestError, match="Only the roles user, ass") as refused:
        rendered(SHAPES["MISTRAL_V3"], [ASK, {**ASK, "role": "guest"}], tools=TOOLS)
    assert refused.value.metadata == {"param": "messages"}
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        rendered("{% if %}", [ASK])


def test_a_sandbox_is_a_sandbox() -> None:
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(_x=1) }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__class__ }}",
        "{{ range(10000000) }}",
    ):
        with pytest.raises(InvalidRequestError):
            rendered(template + "{{ messages[0].content.__class__.__base__ }}", [ASK])
