"""Every field, tool and item of OpenAI's request types is honoured, refused by name, or ignored
with its name in a warning. What carries a part of the conversation is never ignored."""

import json
from typing import Any, get_args, get_type_hints

import pytest
from fakes.transport import MockTransport
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsStreaming as Completion
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Responses

from paceline.gateway.bodies import Body, Refused

from .conftest import Serve, Served
from .test_requests import KINDS, VALID

REPLY = "ok"
TEMPLATE = (
    "{{ reasoning_effort }}{% for t in tools or () %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.content }}{% endfor %}<assistant>"
)
THEIRS = {"chat/completions": Chat, "completions": Completion, "responses": Responses}
IGNORED = {
    "chat/completions": {
        *("audio", "moderation", "prediction", "prompt_cache_options", "prompt_cache_retention"),
        *("verbosity", "web_search_options"),
    },
    "completions": {"best_of"},
    "responses": {
        *("access_programs", "background_options", "context_management", "image", "include"),
        *("max_tool_calls", "moderation", "prompt_cache_options", "prompt_cache_retention"),
        "top_logprobs",
    },
}  # Fields that no text's meaning depends on. A new one of OpenAI's belongs here or to the schema.


def refused(kind: type[Body]) -> set[str]:
    fields = kind.model_fields.items()
    return {name for name, field in fields if any(isinstance(m, Refused) for m in field.metadata)}


def literals(hint: Any) -> set[str]:
    """Types of the objects that an annotation of OpenAI's allows."""
    found = set[str]()
    for each in [hint, *get_args(hint)]:
        if isinstance(each, type) and hasattr(each, "__required_keys__"):
            kinds = get_type_hints(each).get("type")
            found |= {kind for kind in _flat(kinds) if isinstance(kind, str)}
        elif each is not hint:
            found |= literals(each)
    return found


def _flat(hint: Any) -> list[Any]:
    arguments = get_args(hint)
    return [each for inner in arguments for each in _flat(inner)] if arguments else [hint]


def sent(served: Served) -> str:
    return bytes(served.transport.requests[-1].prompt_tokens).decode()


@pytest.mark.parametrize("path", KINDS)
async def test_every_field(served: Served, path: str) -> None:
    kind, names = KINDS[path], set(get_type_hints(THEIRS[path]))
    assert names - kind.model_fields.keys() == IGNORED[path]
    for name in sorted(IGNORED[path]):
        status, headers, _ = await served.post(f"/v1/{path}", **VALID[path], **{name: {"a": 1}})
        assert status == 200
        assert headers["x-paceline-warning"] == f"ignored unknown fields: {name}"
    for name in sorted(refused(kind)):
        for value in ("x", {"id": "x"}, [{"name": "x"}], True):
            status, _, answer = await served.post(f"/v1/{path}", **VALID[path], **{name: value})
            assert (status, answer["error"]["param"]) == (400, name)
        for value in ("", [], {}, False, None):
            status, headers, _ = await served.post(f"/v1/{path}", **VALID[path], **{name: value})
            assert (status, headers.get("x-paceline-warning")) == (200, None)


def function(path: str, name: str = "shell") -> dict[str, Any]:
    facts = {"name": name, "parameters": {"type": "object", "properties": {}}}
    if path == "responses":
        return {"type": "function", "strict": False, **facts}
    return {"type": "function", "function": facts}


def named(path: str, name: str) -> dict[str, Any]:
    facts = {"name": name}
    return {"type": "function", **(facts if path == "responses" else {"function": facts})}


OTHER_TOOLS = [
    *(("responses", kind) for kind in sorted(literals(get_type_hints(Responses)["tools"]))),
    *((path, kind) for path in ("responses", "chat/completions") for kind in ("new", "mcp", "")),
]


OURS = ("function", "custom", "namespace")


@pytest.mark.parametrize(("path", "kind"), [each for each in OTHER_TOOLS if each[1] not in OURS])
async def test_other_tools_are_left_out(serve: Serve, path: str, kind: str) -> None:
    """Whatever else they have; the functions beside them stay. A strict gateway refuses them."""
    tool = {"type": kind, "name": "x", "format": {"type": "text"}, "tools": [function(path, "y")]}
    if path == "chat/completions":
        tool = {"type": kind, kind: {"name": "x"}}
    body = {**VALID[path], "tools": [tool, function(path), tool]}
    async with serve(MockTransport("ok"), chat_template=TEMPLATE) as served:
        for choice in (None, "auto", "none", "required", named(path, "shell")):
            status, headers, answer = await served.post(f"/v1/{path}", **body, tool_choice=choice)
            assert status == 200, answer
            warning = headers["x-paceline-warning"]
            assert warning == f"ignored unknown fields: tools.{kind}.x"
            if choice != "none":
                assert sent(served).startswith("[shell]<user>a")
            if path == "responses":
                assert [each["type"] for each in answer["tools"]] == ["function"]
        # With no tool left, none can be required.
        status, headers, answer = await served.post(
            f"/v1/{path}", **VALID[path], tools=[tool], tool_choice="required"
        )
        assert (status, sent(served)) == (200, "<user>a<assistant>")
        warning = headers["x-paceline-warning"]
        assert warning == f"ignored unknown fields: tools.{kind}.x, tool_choice"
        assert answer.get("tool_choice", "auto") == "auto"
        # The choice of one that is not there is an error.
        for choice in (named(path, "x"), {**tool, "tools": []}):
            if choice["type"] == "":
                continue
            status, _, answer = await served.post(f"/v1/{path}", **body, tool_choice=choice)
            assert (status, answer["error"]["param"]) == (400, "tool_choice")
    async with serve(MockTransport("ok"), chat_template=TEMPLATE, strict=True) as served:
        status, _, answer = await served.post(f"/v1/{path}", **body)
        assert (status, answer["error"]["param"]) == (400, f"tools.{kind}.x")


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
async def test_allowed_tools(served: Served, path: str) -> None:
    tools = [*(function(path, name) for name in "abc"), {"type": "web_search"}]
    body = {**VALID[path], "tools": tools}

    async def ask(mode: str, *allowed: Any) -> tuple[int, Any, Any]:
        choice: Any = {"mode": mode, "tools": list(allowed)}
        choice = choice if path == "responses" else {"allowed_tools": choice}
        choice = {"type": "allowed_tools", **choice}
        return await served.post(f"/v1/{path}", **body, tool_choice=choice)

    for mode in ("auto", "required"):
        status, _, answer = await ask(mode, named(path, "b"), {"type": "web_search"})
        assert (status, sent(served)) == (200, "[b]<user>a<assistant>"), answer
        schema = served.transport.requests[-1].sampling.json_schema
        assert bool(schema) == (mode == "required")
        assert '"const": "a"' not in schema
        status, headers, _ = await ask(mode, {"type": "web_search"})
        assert (status, sent(served)) == (200, "<user>a<assistant>")
        assert ("tool_choice," in headers["x-paceline-warning"] + ",") == (mode == "required")
        for wrong in ([named(path, "z")], []):
            status, _, answer = await ask(mode, *wrong)
            assert status == 400
            assert answer["error"]["param"].startswith("tool_choice")
    assert (await ask("never", named(path, "b")))[0] == 400


@pytest.mark.parametrize("kind", sorted(literals(get_type_hints(Responses)["tool_choice"])))
async def test_choices_of_tools(served: Served, kind: str) -> None:
    shell = function("responses")
    choice = {"type": kind, "name": "shell", "mode": "auto", "tools": [shell]}
    body = {"input": "a", "tools": [shell, {**shell, "type": kind}], "tool_choice": choice}
    status, _, answer = await served.post("/v1/responses", **body)
    if kind in ("function", "custom", "allowed_tools"):
        assert status == 200
        return
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    assert repr(kind) in answer["error"]["message"]


SHOWN: dict[str, dict[str, Any]] = {
    "message": {"role": "user", "content": [{"type": "input_text", "text": "zebra"}]},
    "function_call": {"call_id": "1", "name": "f", "arguments": '{"a": "zebra"}'},
    "function_call_output": {"call_id": "1", "output": [{"type": "input_text", "text": "zebra"}]},
    "custom_tool_call": {"call_id": "1", "name": "apply_patch", "input": "zebra"},
    "custom_tool_call_output": {"call_id": "1", "output": "zebra"},
    "additional_tools": {"role": "developer", "tools": [{"type": "custom", "name": "zebra"}]},
    "local_shell_call": {"call_id": "1", "action": {"type": "exec", "command": ["ls", "zebra"]}},
    "local_shell_call_output": {"id": "1", "output": "zebra"},
    "shell_call": {"call_id": "1", "action": {"commands": ["ls zebra"]}},
    "shell_call_output": {"call_id": "1", "output": [{"stdout": "zebra", "stderr": ""}]},
    "apply_patch_call": {"call_id": "1", "operation": {"type": "create_file", "path": "zebra"}},
    "apply_patch_call_output": {"call_id": "1", "status": "failed", "output": "zebra"},
    "web_search_call": {"id": "1", "status": "completed", "action": {"query": "zebra"}},
    "file_search_call": {"id": "1", "queries": ["q"], "results": [{"text": "zebra"}]},
    "code_interpreter_call": {"id": "1", "code": "1", "outputs": [{"logs": "zebra"}]},
    "mcp_call": {"id": "1", "name": "n", "server_label": "s", "arguments": "{}", "output": "zebra"},
    "reasoning": {"id": "1", "content": [{"type": "reasoning_text", "text": "zebra"}]},
}  # an item of each type that is shown to the model, with a word in what it carries


@pytest.mark.parametrize("kind", sorted(literals(get_type_hints(Responses)["input"]) | {"new"}))
async def test_items_are_shown_or_refused_by_name(served: Served, kind: str) -> None:
    facts = SHOWN.get(kind, {"id": "1", "call_id": "1", "encrypted_content": "zebra"})
    user = {"role": "user", "content": "go on"}
    for after in ([], [user], [{"role": "assistant", "content": "done"}, user]):
        items = [user, {"type": kind, "status": "completed", **facts}, *after]
        status, headers, answer = await served.post("/v1/responses", input=items)
        if kind in SHOWN:
            assert (status, headers.get("x-paceline-warning")) == (200, None), answer
            assert sent(served).count("zebra") == 1
        else:
            assert (status, answer["error"]["param"]) == (400, "input.1")
            assert f"an item of type '{kind}' is not supported" in answer["error"]["message"]


async def test_roles_and_names_of_items(served: Served) -> None:
    items = [{"type": kind, **facts} for kind, facts in SHOWN.items()]
    await served.post("/v1/responses", input=items)
    arguments = '{"action": {"type": "exec", "command": ["ls", "zebra"]}}'
    assert f"local_shell{json.dumps(json.loads(arguments))}" in sent(served)
    assert 'apply_patch{"input": "zebra"}' in sent(served)
    assert "<tool>zebra" in sent(served)
    assert '<tool>[{"stdout": "zebra", "stderr": ""}]' in sent(served)
    assert sent(served).endswith("<assistant>zebra<assistant>")


async def test_thoughts_of_items(served: Served) -> None:
    """They stay with their answer, and each is kept; those that cannot be read are named."""

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    user = {"role": "user", "content": "u"}
    said = {"role": "assistant", "content": "s"}
    for items, prompt in (
        ([user, thought("1"), said, thought("2"), call("f")], "<user>u<assistant>12f{}s"),
        ([user, thought("1"), call("f"), thought("2"), call("g")], "<user>u<assistant>12f{}g{}"),
        ([user, thought("1"), user, said], "<user>u<assistant>1<user>u<assistant>s"),
        ([user, thought("1")], "<user>u<assistant>1"),
    ):
        await served.post("/v1/responses", input=items)
        assert sent(served) == f"{prompt}<assistant>"
    summary = [{"type": "summary_text", "text": "short"}]
    for fields, warned in (({}, True), ({"summary": summary}, False), ({"summary": []}, True)):
        item = {"type": "reasoning", "encrypted_content": "gAAA", **fields}
        _, headers, _ = await served.post("/v1/responses", input=[user, item, said])
        assert ("input.1.encrypted_content" in headers.get("x-paceline-warning", "")) == warned
        assert ("short" in sent(served)) == (not warned)


async def test_calls_of_custom_tools_in_a_chat(served: Served) -> None:
    call = {"type": "custom", "id": "1", "custom": {"name": "patch", "input": "zebra"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        result,
    ]
    status, _, _ = await served.post("/v1/chat/completions", messages=messages)
    assert (status, sent(served)) == (
        200,
        '<user>a<assistant>patch{"input": "zebra"}<tool>done<assistant>',
    )


PATCH = '*** Begin Patch\n+three "läps"\n*** End Patch'
GRAMMARS = {"lark": "start: /[^z]*/", "regex": "[^z]*"}


@pytest.mark.parametrize("syntax", ["text", *GRAMMARS, None])
@pytest.mark.parametrize("path", ["responses", "chat/completions"])
async def test_a_custom_tool_is_called_with_a_text(
    serve: Serve, path: str, syntax: str | None
) -> None:
    """Its grammar is shown to the model, and a regular expression binds what it is called with."""
    flat = path == "responses"
    facts: dict[str, Any] = {"name": "patch", "description": "Edits"}
    if syntax in GRAMMARS:
        grammar = {"syntax": syntax, "definition": GRAMMARS[syntax]}
        facts["format"] = {"type": "grammar", **(grammar if flat else {"grammar": grammar})}
    elif syntax:
        facts["format"] = {"type": syntax}

    def custom(given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "custom", **(given if flat else {"custom": given})}

    body = {**VALID[path], "tools": [custom(facts), function(path)]}
    marked = '<tool_call>{{"name": "patch", "arguments": {}}}</tool_call>'
    inside = json.dumps({"input": PATCH})
    said: list[str] = []
    template = TEMPLATE.replace("t.function.name", "t.function.description")
    async with serve(MockTransport(lambda prompt: said[-1]), chat_template=template) as served:
        for reply, choice in (
            (marked.format(inside), "auto"),
            (marked.format(json.dumps(PATCH)), "auto"),
            (inside, custom({"name": "patch"})),
        ):
            said.append(reply)
            sent_body = {**body, "tool_choice": choice}
            status, headers, answer = await served.post(f"/v1/{path}", **sent_body)
            assert status == 200, answer
            warning = headers.get("x-paceline-warning", "")
            assert warning.endswith("format.definition") == (syntax == "lark")
            assert GRAMMARS.get(syntax or "", "") in sent(served)
            bound = json.dumps(served.transport.requests[-1].sampling.json_schema)
            assert ("pattern" in bound) == (syntax == "regex" and choice != "auto")
            _, _, text = await served.ask("POST", f"/v1/{path}", json={**sent_body, "stream": True})
            events = [json.loads(line[6:]) for line in text.splitlines() if line[6:7] == "{"]
            if flat:
                (call,) = answer["output"]
                deltas = [e["delta"] for e in events if e["type"].endswith("_call_input.delta")]
                assert "".join(deltas) == call["input"] == PATCH
                assert answer["tools"][0]["type"] == "custom"
                said_again = {"input": [{"role": "user", "content": "a"}, call]}
            else:
                message = answer["choices"][0]["message"]
                (call,) = message["tool_calls"]
                deltas = [e["choices"][0]["delta"] for e in events]
                (streamed,) = [each for delta in deltas for each in delta.get("tool_calls", ())]
                assert streamed["custom"] == call["custom"] == {"name": "patch", "input": PATCH}
                said_again = {"messages": [*body["messages"], message]}
            assert call["type"] == ("custom_tool_call" if flat else "custom")
            status, _, answer = await served.post(f"/v1/{path}", **{**body, **said_again})
            assert status == 200, answer
            assert json.dumps(PATCH) in sent(served)


@pytest.mark.parametrize("place", ["tools", "item"])
async def test_tools_of_namespaces(serve: Serve, place: str) -> None:
    """They have its name before theirs for the model, but for its caller a field; also in items."""
    inner = [function("responses", "sleep"), {"type": "custom", "name": "exec"}]
    tools = [
        {"type": "namespace", "name": "clock", "description": "Time", "tools": inner},
        {"type": "namespace", "name": "functions", "tools": inner},
        {"type": "namespace", "name": "none", "tools": []},
    ]
    user: dict[str, Any] = {"role": "user", "content": "a"}
    item = {"type": "additional_tools", "role": "developer", "tools": tools}
    body = {"tools": tools, "input": [user]} if place == "tools" else {"input": [item, user]}
    said: list[str] = []
    async with serve(MockTransport(lambda prompt: said[-1]), chat_template=TEMPLATE) as served:
        for shown, namespace, name in (
            ("clock.sleep", "clock", "sleep"),
            ("clock.exec", "clock", "exec"),
            ("sleep", "functions", "sleep"),
            ("exec", "functions", "exec"),
        ):
            said.append(json.dumps({"name": shown, "arguments": {"input": "x"}}))
            said[-1] = f"<tool_call>{said[-1]}</tool_call>"
            status, headers, answer = await served.post("/v1/responses", **body)
            assert (status, headers.get("x-paceline-warning")) == (200, None), answer
            assert sent(served) == "[clock.sleep][clock.exec][sleep][exec]<user>a<assistant>"
            (call,) = answer["output"]
            assert (call["namespace"], call["name"]) == (namespace, name)
            kind = "custom_tool_call" if name == "exec" else "function_call"
            assert (call["type"], call.get("input", "x")) == (kind, "x")
            result = {"type": f"{kind}_output", "call_id": call["call_id"], "output": "done"}
            items = [*body["input"], call, result]
            status, _, answer = await served.post("/v1/responses", **{**body, "input": items})
            assert status == 200, answer
            assert f'<assistant>{shown}{{"input": "x"}}<tool>done' in sent(served)
