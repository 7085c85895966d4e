"""`/v1/messages`: conversations, answers whole and streamed, errors, names of models."""

import asyncio
import json
from typing import Any

import pytest
from fakes.transport import MockTransport

from paceline.client import Client
from paceline.gateway import OneModel

from .conftest import Serve, Served
from .test_requests import VALID
from .test_streaming import SeveralRounds

REPLY = "ok"
TEMPLATE = (
    "{{ enable_thinking }}{{ reasoning_effort }}"
    "{% for t in tools or () %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or () %}({{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}){% endfor %}{{ m.tool_call_id }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER: Any = {"role": "user", "content": "a"}
RIDE: Any = {
    "name": "ride",
    "description": "Ride some laps",
    "input_schema": {"type": "object", "properties": {"laps": {"type": "integer"}}},
}
WALK: Any = {"type": "custom", "name": "walk", "input_schema": {"type": "object"}}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
CALL = '<tool_call>{"name": "ride", "arguments": {"laps": 3}}</tool_call>'


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def called(id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "ride", "input": given}


def result(id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content}


async def ask(served: Served, **body: Any) -> tuple[int, Any, Any]:
    """Status, headers and answer; a conversation, unless it is given."""
    return await served.post("/v1/messages", **{"messages": [USER], "max_tokens": 999, **body})


async def events_of(served: Served, **body: Any) -> list[Any]:
    asked = {"messages": [USER], "max_tokens": 999, "stream": True, **body}
    _, _, told = await served.ask("POST", "/v1/messages", json=asked)
    events = []
    for lines in told.split("\n\n")[:-1]:
        kind, _, data = lines.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def joined(events: list[Any]) -> Any:
    """The message that a client makes of events, as Anthropic's clients do."""
    message = events[0]["message"]
    arguments = ""
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                kind, delta = event["delta"]["type"], event["delta"]
                block = message["content"][-1]
                if kind == "input_json_delta":
                    arguments += delta["partial_json"]
                elif kind == "signature_delta":
                    block["signature"] = delta["signature"]
                else:
                    name = kind.removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
    assert events[-1] == {"type": "message_stop"}
    return message


def by_model(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*content]}


def by_user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
CALLS = by_model(THOUGHT, text("I go"), called("1", laps=1), called("2", laps=2) | CACHED)
RESULTS = by_user(result("1", "x"), result("2", [text("y")]), text("b"))
CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    ({"system": "s"}, "<system>s<user>a<assistant>"),
    ({"system": [text("s") | CACHED, text("t")]}, "<system>s\nt<user>a<assistant>"),
    ({"messages": [by_user(text("a"), text("b"))]}, "<user>a\nb<assistant>"),
    ({"messages": [USER, by_model(text("b")), USER]}, "<user>a<assistant>b<user>a<assistant>"),
    # The answer goes on with the text of a last message of the assistant.
    ({"messages": [USER, {"role": "assistant", "content": "b c"}]}, "<user>a<assistant>b c"),
    (
        {"messages": [USER, CALLS, RESULTS], "tools": [RIDE, WALK | CACHED]},
        '[ride][walk]<user>a<assistant>hmI go(1 ride {"laps": 1})(2 ride {"laps": 2})'
        "<tool>x1<tool>y2<user>b<assistant>",
    ),
    (
        {"messages": [USER, by_model(called("1")), by_user(result("1", []) | {"is_error": True})]},
        "<user>a<assistant>(1 ride {})<tool>1<assistant>",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "True<user>a<assistant>"),
    ({"thinking": {"type": "disabled"}}, "False<user>a<assistant>"),
    ({"thinking": {"type": "adaptive"}}, "<user>a<assistant>"),
    ({"output_config": {"effort": "low"}}, "low<user>a<assistant>"),
    ({"tools": [RIDE], "tool_choice": {"type": "none"}}, "<user>a<assistant>"),
    # What differs in each request of Claude Code is left out.
    (
        {"system": [text("x-anthropic-billing-header: cc_version=2.1; cch=4f;"), text("s")]},
        "<system>s<user>a<assistant>",
    ),
]


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS)
async def test_the_prompt_of_a_conversation(served: Served, body: Any, prompt: str) -> None:
    status, headers, answer = await ask(served, **body)
    assert status == 200, answer
    assert headers.get("x-paceline-warning") is None
    assert bytes(served.transport.requests[-1].prompt_tokens).decode() == prompt
    counted = {"messages": [USER], **body}
    _, _, tokens = await served.post("/v1/messages/count_tokens", **counted)
    assert tokens == {"input_tokens": answer["usage"]["input_tokens"]}
    assert tokens["input_tokens"] == len(prompt)


LAPS, UNSIGNED = called("", laps=3), {**THOUGHT, "signature": "unsigned"}
RIDES = {"tools": [RIDE], "tool_choice": {"type": "tool", "name": "ride"}}
ONE = {"tools": [RIDE], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
ANY = {"tools": [RIDE, WALK], "tool_choice": {"type": "any"}}
BOTH = '[{"name": "walk", "arguments": {}}, {"name": "ride", "arguments": {"laps": 3}}]'
ODD = CALL.replace('{"laps": 3}', r'"{\"laps\": NaN}"')  # no JSON
ANSWERS: list[tuple[dict[str, Any], str, list[Any], str]] = [
    ({}, "Hello there.", [text("Hello there.")], "end_turn"),
    ({}, "", [], "end_turn"),
    ({"max_tokens": 3}, "Hello", [text("Hel")], "max_tokens"),
    ({"stop_sequences": ["!", "."]}, "One. Two!", [text("One")], "stop_sequence"),
    ({"tools": [RIDE]}, f"I go.{CALL}{CALL}", [text("I go."), LAPS, LAPS], "tool_use"),
    (ONE, CALL * 2, [LAPS], "tool_use"),
    (RIDES, '{"laps": 3}', [LAPS], "tool_use"),
    (ANY, BOTH, [called("") | {"name": "walk"}, LAPS], "tool_use"),
    ({"tools": [RIDE]}, ODD, [called("", input='{"laps": NaN}')], "tool_use"),
    ({"tools": [RIDE], "max_tokens": 30}, CALL, [text(CALL[:30])], "max_tokens"),
    ({}, "<think>hm</think>\n\nyes", [UNSIGNED, text("yes")], "end_turn"),
]


@pytest.mark.parametrize(("body", "reply", "content", "reason"), ANSWERS)
async def test_an_answer_whole_and_streamed(
    serve: Serve, body: Any, reply: str, content: list[Any], reason: str
) -> None:
    async with serve(MockTransport(reply), chat_template=TEMPLATE) as served:
        status, _, whole = await ask(served, model="mock", **body)
        assert status == 200, whole
        events = await events_of(served, **body)
        streamed = joined(events)
        assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    for message in (whole, streamed):
        assert [{**b, "id": ""} if "id" in b else b for b in message["content"]] == content
        ids = [block["id"] for block in message["content"] if "id" in block]
        assert len(set(ids)) == len(ids)
        stop = "." if reason == "stop_sequence" else None
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
        assert message["id"].startswith("msg_")
        kinds = message["type"], message["role"], message["model"]
        assert kinds == ("message", "assistant", "mock")
    del whole["usage"]["speculation"], streamed["usage"]["speculation"]
    assert whole["usage"] == streamed["usage"]
    assert events[0]["message"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("reused", [0, 64, 227])
async def test_cached_tokens_are_no_part_of_the_others(serve: Serve, reused: int) -> None:
    async with serve(MockTransport("x"), chat_template=TEMPLATE) as served:
        served.transport.reused = reused
        system = "s" * 300
        whole = (await ask(served, system=system))[2]["usage"]
        streamed = joined(await events_of(served, system=system))["usage"]
        for used in (whole, streamed):
            assert used["cache_read_input_tokens"] == reused // 64 * 64
            total = used["input_tokens"] + used["cache_read_input_tokens"]
            assert total == len(f"<system>{system}<user>a<assistant>")
            assert used["cache_creation_input_tokens"] == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [by_user({"type": "image", "source": {}})]}, "'image'"),
    ({"messages": [by_user(result("1", [{"type": "image"}]))]}, "'image'"),
    ({"messages": [by_user({"type": "tool_result"})]}, "tool_use_id"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"metadata": {"user_id": "[" * 100_000}}, "user: String should have at most"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"tools": [{"name": "ride"}]}, "input_schema"),
    ({"tools": [RIDE], "tool_choice": {"type": "tool", "name": "fly"}}, "'fly'"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"temperature": -1}, ">= 0"),
    ({"system": "s" * 2000}, "prompt is too long"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
async def test_refusals_have_anthropics_form(serve: Serve, body: Any, message: str) -> None:
    async with serve(MockTransport("x", 1000), chat_template=TEMPLATE) as served:
        status, _, answer = await ask(served, **body)
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"]


async def test_statuses_and_keys(serve: Serve) -> None:
    options: dict[str, Any] = {"chat_template": TEMPLATE, "api_key": "right"}
    async with serve(MockTransport("x"), max_body_bytes=2000, **options) as served:
        sent = {"messages": [USER], "max_tokens": 1}
        for status, kind, headers, body in (
            (401, "authentication_error", {}, sent),
            (401, "authentication_error", {"x-api-key": "wrong"}, sent),
            (404, "not_found_error", {"x-api-key": "right"}, {**sent, "model": "other"}),
            (413, "request_too_large", {"x-api-key": "right"}, {**sent, "system": "s" * 3000}),
            (200, None, {"x-api-key": "right", "anthropic-version": "2023-06-01"}, sent),
            (200, None, {"Authorization": "Bearer right", "anthropic-beta": "x"}, sent),
        ):
            found, _, told = await served.ask("POST", "/v1/messages", json=body, headers=headers)
            answer = json.loads(told)
            assert found == status
            assert answer["type"] == ("error" if kind else "message")
            assert answer.get("error", {}).get("type") == kind


async def test_an_error_in_mid_stream(serve: Serve) -> None:
    async with serve(SeveralRounds("abcdefghij", messages=1), chat_template=TEMPLATE) as served:
        events = await events_of(served)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "the mock fails" in events[-1]["error"]["message"]


async def test_counted_tokens_are_one_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if `stream` is asked for, and the model takes long to load."""
    acquire = OneModel.acquire

    async def slow(*given: Any, **options: Any) -> Client:
        await asyncio.sleep(0.1)
        return await acquire(*given, **options)

    monkeypatch.setattr(OneModel, "acquire", slow)
    transport = MockTransport("ok")
    async with serve(transport, chat_template=TEMPLATE, keep_alive_seconds=0.01) as served:
        status, _, body = await served.post(
            "/v1/messages/count_tokens", messages=[USER], stream=True
        )
    assert (status, [*body]) == (200, ["input_tokens"])


async def test_what_cannot_be_done_is_named_in_a_warning(served: Served) -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    for body, warning in (
        ({"tools": [RIDE, SEARCH]}, "tools.web_search_20250305.web_search"),
        ({"messages": [USER, by_model(redacted, text("b")), USER]}, "messages.content.data"),
        ({"context_management": {}}, "context_management"),
    ):
        status, headers, _ = await ask(served, **body)
        assert status == 200
        assert headers["x-paceline-warning"] == f"ignored unknown fields: {warning}"


async def test_a_user_is_the_same_in_all_sessions(served: Served) -> None:
    async def user(user_id: str | None) -> str:
        await ask(served, metadata={"user_id": user_id})
        return served.transport.requests[-1].user

    assert await user(None) == ""
    sessions = {await user(f"user_1_account__session_{n}-ab") for n in range(3)}
    told = {await user(json.dumps({"device_id": "d", "session_id": n})) for n in "ab"}
    assert len(sessions) == len(told) == 1
    assert len({*sessions, *told, "", await user("user_2"), await user("[1]")}) == 5


PATHS: dict[str, dict[str, Any]] = VALID | {
    "messages": {"messages": [USER], "max_tokens": 9},
    "messages/count_tokens": {"messages": [USER]},
}


@pytest.mark.parametrize("path", PATHS)
async def test_names_of_hosted_models(serve: Serve, path: str) -> None:
    """They stand for the served model at every path, with a word; unless it is strict."""
    for strict in (False, True):
        options: dict[str, Any] = {"chat_template": TEMPLATE, "strict": strict}
        async with serve(MockTransport("x"), **options) as served:
            for name in ("claude-sonnet-5", "gpt-5.1-codex", "o4-mini", "gemini-3-pro", "codex-1"):
                status, headers, answer = await served.post(
                    f"/v1/{path}", **PATHS[path], model=name
                )
                assert status == (404 if strict else 200)
                if not (strict or "count" in path):
                    assert answer["model"] == "mock"
                    assert headers["x-paceline-warning"] == f"mock answers for {name}"
            for name in ("gpt-oss-20b", "qwen2.5-coder", "mock-2", "claudette"):
                status, _, _ = await served.post(f"/v1/{path}", **PATHS[path], model=name)
                assert status == 404


async def test_a_list_of_models_has_both_forms(served: Served) -> None:
    _, _, told = await served.ask("GET", "/v1/models")
    models = json.loads(told)
    (model,) = models["data"]
    assert (models["object"], model["object"], model["type"]) == ("list", "model", "model")
    assert models["has_more"] is False
    assert model["id"] == models["first_id"] == models["last_id"] == model["display_name"]
    assert model["created_at"].endswith("+00:00")
