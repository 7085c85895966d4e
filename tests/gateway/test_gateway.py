"""The gateway with a mock verifier: authentication, validation, disconnects, drain."""

import json
import re
from typing import Any

import openai
import pytest
from fakes.transport import MockTransport

from paceline.client import UnavailableError
from paceline.gateway import GatewayOptions
from paceline.service.options import OptionsError

from .conftest import Serve, Served
from .test_tools import PLAIN

SCRIPTS = ("text/javascript", "application/javascript")
REPLY = str.upper
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.content == "refuse" %}
{{ raise_exception("no such text") }}{% endif %}
<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>{{ mood }}"""


async def test_a_chat_is_rendered_by_the_template(served: Served) -> None:
    answer = await served.openai.chat.completions.create(
        model="mock",
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        extra_body={"chat_template_kwargs": {"mood": "gay"}},
    )
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "<SYSTEM>BE KIND<USER>HI<ASSISTANT>GAY")
    assert answer.choices[0].finish_reason == "stop"


async def test_a_refusal_of_the_template_is_a_bad_request(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="no such text"):
        await served.openai.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "refuse"}]
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_done_to_messages_is_in_a_header(
    serve: Serve, path: str, stream: bool
) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.content }}>"
        "{% endif %}{% endfor %}"
    )
    texts = {"system": "one", "user": "two", "developer": "three"}
    messages = [{"role": role, "content": text} for role, text in texts.items()]
    name = "input" if path.endswith("responses") else "messages"
    async with serve(MockTransport("x"), chat_template=template) as served:
        for sent, warning in (
            (messages, "unknown fields: odd; system messages were merged into the first one"),
            (messages[:2], "unknown fields: odd"),
        ):
            body = {name: sent, "stream": stream, "odd": 1}
            status, headers, _ = await served.ask("POST", path, json=body)
            assert (status, headers["x-paceline-warning"]) == (200, f"ignored {warning}")
            prompt = bytes(served.transport.requests[-1].prompt_tokens).decode()
            assert prompt == ("<one\n\nthree><two>" if len(sent) == 3 else "<one><two>")


async def test_a_model_without_a_template_is_a_bad_request(serve: Serve) -> None:
    async with serve(MockTransport("x")) as served:
        with pytest.raises(openai.BadRequestError, match="--chat-template") as raised:
            await served.openai.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": "hi"}]
            )
    assert raised.value.code == "no_chat_template"


async def test_the_page_is_whole_and_connects_to_this_gateway_only(serve: Serve) -> None:
    """Its files need no key, and there is nothing else below its path."""
    async with serve(MockTransport("x"), api_key="secret") as served:
        _, headers, page = await served.ask("GET", "/")
        policy = headers["Content-Security-Policy"]
        assert page.startswith("<!doctype html>")
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy
        for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page):
            status, headers, _ = await served.ask("GET", f"/{name}")
            assert status == 200
            assert headers["Content-Type"].partition(";")[0] in ("text/css", *SCRIPTS)
        for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/none.js"):
            assert (await served.ask("GET", path))[0] in (401, 404)


async def test_a_wrong_model_and_a_wrong_path(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'mock'") as raised:
        await served.openai.completions.create(model="other", prompt="a")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    assert (await served.openai.completions.create(model="", prompt="a")).model == "mock"
    with pytest.raises(openai.NotFoundError):
        await served.openai.embeddings.create(model="mock", input="a")
    model = await served.openai.models.retrieve("mock")
    assert model.id == "mock"
    assert model.model_extra is not None
    assert model.model_extra["batch_invariant"] is True
    assert model.model_extra["chat_template"] is True
    assert model.model_extra["batch_invariance_reason"] == ""


@pytest.mark.parametrize(
    ("status", "body", "headers", "message"),
    [
        (415, b'{"prompt": "a"}', {"Content-Type": "text/plain"}, "application/json"),
        (413, b" " * 200_001, {}, "longer than --max-body"),
        (400, b"{", {}, "JSON"),
        (400, b'{"prompt": "\\ud800"}', {}, "surrogate"),
        (400, b'{"prompt": "a", "metadata": {"a": NaN}}', {}, "NaN"),
        (400, b'{"prompt": "a", "metadata": {"a": 1e999}}', {}, "too large"),
        (400, b'{"prompt": "a"}', {"Content-Encoding": "gzip"}, "encoding"),
        (400, b"[" * 100_000, {}, "nested"),
    ],
)
async def test_only_json_of_a_bounded_size_is_read(
    serve: Serve, status: int, body: bytes, headers: dict[str, str], message: str
) -> None:
    async with serve(MockTransport("x"), max_body_bytes=200_000) as served:
        headers = {"Content-Type": "application/json", **headers}
        given: dict[str, Any] = {"data": body, "headers": headers, "compress": False}
        found, _, text = await served.ask("POST", "/v1/completions", **given)
    error = json.loads(text)["error"]
    assert (found, error.keys()) == (status, {"message", "type", "param", "code"})
    assert message in error["message"]


async def test_the_api_key_is_required(serve: Serve) -> None:
    async with serve(MockTransport("x"), key="right", api_key="right") as served:
        assert (await served.openai.models.list()).data[0].id == "mock"
        with pytest.raises(openai.AuthenticationError):
            await served.openai.with_options(api_key="wrong").models.list()
        status, _, text = await served.ask("GET", "/health")
        assert (status, json.loads(text)) == (200, {"status": "ok", "drafters": []})
        status, _, text = await served.ask("GET", "/version")
        assert json.loads(text)["version"]


async def test_a_lost_verifier_is_unavailable(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(MockTransport("x")) as served:

        async def lost(*_: object) -> None:
            raise UnavailableError("nobody is there")

        monkeypatch.setattr(served.transport, "get_model", lost)
        with pytest.raises(openai.InternalServerError, match="nobody is there") as raised:
            await served.openai.models.list()
        assert raised.value.status_code == 503
        assert (await served.ask("GET", "/health"))[0] == 503


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "0.0.0.0:8080"}, "--insecure"),
        ({"address": "0.0.0.0:8080", "api_key": "k"}, "--http-tls-cert"),
        ({"address": "here"}, "host:port"),
        ({"api_key": "ü"}, "headers"),
        ({"max_requests": 0}, "at least one"),
        ({"metrics_address": "0.0.0.0:0"}, "metrics"),
        ({"metrics_address": "0.0.0.0:0", "api_key": "right"}, "metrics"),
        ({"insecure_metrics": True}, "metrics"),
        ({"metrics_address": "nowhere"}, "host:port"),
    ],
)
def test_options_that_cannot_be_served(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        GatewayOptions(**options)


CONTEXT = 100
LIMITS = [
    ("completions", "max_tokens"),
    ("chat/completions", "max_tokens"),
    ("chat/completions", "max_completion_tokens"),
    ("responses", "max_output_tokens"),
]


def asked(path: str, length: int) -> dict[str, Any]:
    if path == "completions":
        return {"prompt": [97] * length}
    text = "a" * (length - len("<user><assistant>"))
    if path == "responses":
        return {"input": text}
    return {"messages": [{"role": "user", "content": text}]}


def end(answer: Any) -> tuple[int, str]:
    """Number of tokens of an answer, and why it ended."""
    used = answer["usage"]
    reason = (answer.get("incomplete_details") or {}).get("reason")
    tokens = used["output_tokens" if "output_tokens" in used else "completion_tokens"]
    return tokens, reason or answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize(("path", "param"), LIMITS)
async def test_a_limit_is_cut_to_the_room_in_the_context(
    serve: Serve, path: str, param: str
) -> None:
    """Also where it is larger than any context, and in a stream; a text then ends by its length."""
    reason = "max_output_tokens" if path == "responses" else "length"
    async with serve(MockTransport("x" * CONTEXT, CONTEXT), chat_template=PLAIN) as served:
        for room in (1, 2, 3, 40):
            body = asked(path, CONTEXT - room)
            for limit in (room, room + 1, CONTEXT, 32_000, 2**31 - 1, 2**53, 1e6):
                status, _, answer = await served.post(f"/v1/{path}", **body, **{param: limit})
                assert (status, end(answer)) == (200, (room, reason)), limit
            default = min(room, 16) if path == "completions" else room
            assert end((await served.post(f"/v1/{path}", **body))[2]) == (default, reason)
            if room > 1:
                less = {param: room - 1}
                assert end((await served.post(f"/v1/{path}", **body, **less))[2])[0] == room - 1
            sent = {**body, param: 32_000, "stream": True}
            _, _, text = await served.ask("POST", f"/v1/{path}", json=sent)
            assert f'"{reason}"' in text
            assert "error" not in text.replace('"error": null', "")
        for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
            body = asked(path, length)
            for limit in (None, 1, 32_000):
                status, _, answer = await served.post(f"/v1/{path}", **body, **{param: limit})
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
                assert answer["error"]["param"] == next(iter(body))
                assert f"maximum context length is {CONTEXT} tokens" in answer["error"]["message"]


@pytest.mark.parametrize(("path", "param"), LIMITS)
async def test_a_strict_gateway_refuses_a_limit_beyond_the_context(
    serve: Serve, path: str, param: str
) -> None:
    transport = MockTransport("x" * CONTEXT, CONTEXT)
    async with serve(transport, chat_template=PLAIN, strict=True) as served:
        body = asked(path, CONTEXT - 3)
        for limit, wanted in ((3, 200), (4, 400), (32_000, 400), (None, 200)):
            status, _, answer = await served.post(f"/v1/{path}", **body, **{param: limit})
            assert status == wanted
            if status == 400:
                error = answer["error"]
                assert (error["param"], error["code"]) == (param, "context_length_exceeded")
                assert "room for 3 " in error["message"]


@pytest.mark.parametrize(("reused", "told"), [(0, 0), (63, 0), (64, 64), (218, 192), (227, 192)])
async def test_cached_tokens_are_counted_in_chunks(serve: Serve, reused: int, told: int) -> None:
    async with serve(MockTransport("x"), chat_template=TEMPLATE) as served:
        served.transport.reused = reused
        for path, body, used in (
            ("completions", {"prompt": "a"}, "prompt_tokens_details"),
            ("responses", {"input": "a"}, "input_tokens_details"),
        ):
            _, _, answer = await served.post(f"/v1/{path}", **body)
            assert answer["usage"][used]["cached_tokens"] == told
        _, _, answer = await served.post("/v1/completions", prompt=["a", "b"], n=2)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * told


async def test_whose_text_it_is(serve: Serve) -> None:
    """The verifier gets a name for each pair of key and user, and learns neither of them."""
    names = []
    for key in ("", "one", "other"):
        options = {"api_key": key, "key": key} if key else {}
        async with serve(MockTransport("x"), chat_template=TEMPLATE, **options) as served:
            for user in (openai.omit, "anna", "bob"):
                await served.openai.completions.create(model="mock", prompt="a", user=user)
                await served.openai.chat.completions.create(
                    model="mock", messages=[{"role": "user", "content": "a"}], user=user
                )
                await served.openai.responses.create(model="mock", input="a", user=user)
            names += [request.user for request in served.transport.requests]
    assert names[:3] == [""] * 3
    assert [len(set(names[at : at + 3])) for at in range(0, len(names), 3)] == [1] * 9
    assert len(set(names)) == 9
    assert not any(word in name for word in ("anna", "bob", "one", "other") for name in names)
