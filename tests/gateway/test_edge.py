"""What surrounds requests: ids, CORS, the access log, comments of slow streams, metrics."""

import asyncio
import logging
from typing import Any

import aiohttp
import openai
import pytest
from calls import until
from documented_metrics import described, documented
from fakes.transport import MockTransport
from prometheus_client import CollectorRegistry

from paceline.gateway import GatewayOptions, server
from paceline.gateway.metrics import GatewayMetrics
from paceline.service.runtime import JsonFormatter, TextFormatter

from .conftest import Serve, Served
from .test_tools import PLAIN


async def test_a_request_has_an_id(serve: Serve) -> None:
    async with serve(MockTransport("x")) as served:
        for given, kept in (("mine-1", True), ("", False), ("x" * 200, False)):
            _, headers, _ = await served.ask("GET", "/v1/models", headers={"x-request-id": given})
            assert (headers["x-request-id"] == given) == kept
            assert headers["x-request-id"]
        _, headers, _ = await served.ask("GET", "/nowhere")
        assert headers["x-request-id"].startswith("req_")


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
MESSAGES = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
PAGE = "https://page.example"


async def asked(served: Served, method: str, **headers: str) -> tuple[int, Any]:
    body = {"json": {"prompt": "a"}} if method == "POST" else {}
    return (await served.ask(method, "/v1/completions", headers=headers, **body))[:2]


@pytest.mark.parametrize(
    ("origin", "key", "allowed", "status"),
    [
        (PAGE, "", [], 403),
        (PAGE, "", [PAGE], 200),
        (PAGE, "", ["*"], 200),
        (PAGE, "k", [], 403),
        (PAGE, "k", [PAGE], 200),
        (f"{PAGE}:8443", "", [PAGE], 403),
        (f"{PAGE}.evil.example", "", [PAGE], 403),
        ("null", "", [PAGE], 403),
        ("", "", [], 403),
        # Pages that programs of this machine serve.
        ("http://localhost:3000", "", [], 200),
        ("https://127.0.0.1", "", [], 200),
        ("http://[::1]:5173", "", [], 200),
        ("http://localhost:3000", "k", [], 403),
        ("http://localhost.evil.example", "", [], 403),
        ("http://localhost@evil.example", "", [], 403),
        ("http://localhost:3000.evil.example", "", [], 403),
        ("ftp://localhost", "", [], 403),
    ],
)
async def test_pages_of_other_origins(
    serve: Serve, origin: str, key: str, allowed: list[str], status: int
) -> None:
    options = {"api_key": key} if key else {}
    async with serve(MockTransport("x"), cors_origins=allowed, **options) as served:
        given = {"Origin": origin, "Authorization": f"Bearer {key}"}
        found, headers = await asked(served, "POST", **given)
        preflight, answer = await asked(served, "OPTIONS", Origin=origin, **PREFLIGHT)
        assert (found, preflight) == (status, 204 if status == 200 else 403)
        readable = origin if status == 200 else None
        assert headers.get("Access-Control-Allow-Origin") == readable
        assert answer.get("Access-Control-Allow-Origin") == readable
        assert headers["Vary"] == answer["Vary"] == "Origin"
        if status == 200:
            assert answer["Access-Control-Allow-Headers"] == "authorization, content-type"
            assert "POST" in answer["Access-Control-Allow-Methods"]
            # Errors can be read too.
            found, headers = await asked(served, "DELETE", **given)
            assert (found, headers["Access-Control-Allow-Origin"]) == (405, origin)


async def test_the_gateways_own_page(serve: Serve) -> None:
    """Its requests carry the origin that they are for, under any name, also behind a proxy."""
    for options in ({"api_key": "k"}, {"insecure": True, "address": "0.0.0.0:0"}):
        async with serve(MockTransport("x"), **options) as served:
            for host, origin, status in (
                ("llm.example", "https://llm.example", 200),
                ("llm.example", "http://llm.example", 200),
                ("llm.example:8443", "https://llm.example:8443", 200),
                ("llm.example:443", "https://llm.example", 200),
                ("llm.example", "https://llm.example:8443", 403),
                ("llm.example", "https://evil.example", 403),
            ):
                headers = {"Host": host, "Origin": origin, "Authorization": "Bearer k"}
                assert (await asked(served, "POST", **headers))[0] == status, (host, origin)


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("localhost", {}, 200),
        ("LocalHost:1234", {}, 200),
        ("127.0.0.1", {}, 200),
        ("[::1]:8080", {}, 200),
        ("evil.example", {}, 403),
        ("evil.example:8080", {}, 403),
        ("localhost.evil.example", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("evil.example#localhost", {}, 403),
        ("evil.example", {"allowed_hosts": ["other.example"]}, 403),
        ("Evil.Example:8080", {"allowed_hosts": ["evil.example"]}, 200),
        ("evil.example", {"api_key": "k"}, 200),
        ("evil.example", {"api_key": "k", "allowed_hosts": ["llm.example"]}, 403),
        ("evil.example", {"insecure": True, "address": "0.0.0.0:0"}, 200),
    ],
)
async def test_a_name_that_was_rebound_to_this_machine(
    serve: Serve, host: str, options: dict[str, Any], status: int
) -> None:
    """Its pages send its own name, as if it were this gateway's."""
    async with serve(MockTransport("x"), **options) as served:
        headers = {"Host": host, "Origin": f"http://{host}", "Authorization": "Bearer k"}
        assert (await asked(served, "POST", **headers))[0] == status
        for path in ("/", "/health", "/version", "/metrics", "/v1/models"):
            found, _, _ = await served.ask("GET", path, headers={"Host": host})
            assert (found == 403) == (status == 403)


async def test_the_access_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline.gateway.access")
    async with serve(MockTransport("abc"), key="a", api_key="a") as served:
        await served.openai.completions.create(model="mock", prompt="hello")
        with pytest.raises(openai.AuthenticationError):
            await served.openai.with_options(api_key="wrong").models.list()
        await served.ask("GET", "/health")
    lines = [record for record in caplog.records if record.name == "paceline.gateway.access"]
    assert [line.getMessage() for line in lines] == [
        "POST /v1/completions 200",
        "GET /v1/models 401",
    ]
    first, second = (vars(line) for line in lines)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (5, 4)
    assert (second["prompt_tokens"], second["completion_tokens"]) == (0, 0)


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
async def test_a_path_cannot_forge_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture, form: logging.Formatter
) -> None:
    caplog.set_level(logging.INFO, logger="paceline.gateway.access")
    async with serve(MockTransport("x")) as served:
        for path in ("/v1/x%0a12:00:00%20INFO%20GET", "/v1/%1b[2J", "/v1/%c2%9b2J", "/%e2%80%ae"):
            assert (await served.ask("GET", path))[0] == 404
    lines = [form.format(record) for record in caplog.records if "access" in record.name]
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines), lines


@pytest.mark.parametrize(
    ("path", "body", "first", "later"),
    [
        ("completions", {"prompt": "a"}, b": keep-alive\n", b"[DONE]"),
        ("messages", MESSAGES, b"event: ping\n", b"event: message_start"),
    ],
    ids=["completions: comments", "messages: pings"],
)
async def test_a_slow_stream_begins_with_signs_of_life(
    serve: Serve, path: str, body: dict[str, Any], first: bytes, later: bytes
) -> None:
    transport = MockTransport("x")
    transport.may_prefill.clear()
    async with serve(transport, chat_template=PLAIN, keep_alive_seconds=0.01) as served:
        async with aiohttp.ClientSession() as session:
            asked = {"model": "mock", "stream": True, **body}
            async with session.post(f"{served.url}/v1/{path}", json=asked) as response:
                assert await response.content.readline() == first
                transport.may_prefill.set()
                assert later in await response.content.read()
        # Clients skip them.
        stream = await served.openai.completions.create(model="mock", prompt="a", stream=True)
        assert "".join([event.choices[0].text async for event in stream]) == "x"


PATH = "/v1/completions"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """What the gateways of a test count into; no endpoint is served."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    monkeypatch.setattr(server, "serve_gateway_metrics", lambda options: (metrics, None))
    return registry


def counted(registry: CollectorRegistry, status: int) -> float:
    """Completions that ended with a status."""
    labels = {"path": PATH, "status": str(status)}
    return registry.get_sample_value("specdec_gateway_requests_total", labels) or 0


async def test_requests_are_counted_as_they_end(serve: Serve, registry: CollectorRegistry) -> None:
    def value(name: str) -> float:
        return registry.get_sample_value(name) or 0

    transport = MockTransport(lambda prompt: prompt.upper())
    async with serve(transport, key="right", api_key="right") as served:
        await served.openai.completions.create(model="mock", prompt=["abc", "d"], n=2)
        stream = await served.openai.completions.create(model="mock", prompt="ab", stream=True)
        assert [event async for event in stream]
        with pytest.raises(openai.NotFoundError):
            await served.openai.completions.create(model="other", prompt="a")
        wrong = served.openai.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            await wrong.completions.create(model="mock", prompt="a")
        await served.openai.models.retrieve("mock")
        await served.ask("GET", "/health")
    assert [counted(registry, status) for status in (200, 404, 401)] == [2, 1, 1]
    one = {"path": "/v1/models/{name}", "status": "200"}
    assert registry.get_sample_value("specdec_gateway_requests_total", one) == 1
    assert value("specdec_gateway_prompt_tokens_total") == 3 + 3 + 1 + 1 + 2
    # Each text also ends with a token that is not shown.
    assert value("specdec_gateway_generation_tokens_total") == 4 + 4 + 2 + 2 + 3
    assert value("specdec_gateway_time_to_first_token_seconds_count") == 5
    assert value("specdec_gateway_requests_in_flight") == 0
    assert described(registry.collect()) == documented("Gateway")
    serving = {"verifier": "", "state": "serving"}
    assert registry.get_sample_value("specdec_gateway_verifier_state", serving) == 1
    assert (
        registry.get_sample_value("specdec_gateway_verifier_texts_running", {"verifier": ""}) == 0
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_releases_the_cache_and_is_counted_as_499(
    serve: Serve, registry: CollectorRegistry, stream: bool
) -> None:
    async with serve(MockTransport("x" * 50_000)) as served:
        body = {"model": "mock", "prompt": "a", "max_tokens": 50_000, "stream": stream}
        async with aiohttp.ClientSession() as session:
            call = asyncio.create_task(session.post(f"{served.url}{PATH}", json=body))
            await until(lambda: served.transport.open_caches == 1)
            assert registry.get_sample_value("specdec_gateway_requests_in_flight") == 1
            (await call).close() if stream else call.cancel()
            await until(lambda: served.transport.open_caches == 0)
            await until(lambda: counted(registry, 499) == 1)
        assert not served.server.done(), "it serves on"


async def test_the_endpoint_requires_the_key() -> None:
    options = {"metrics_address": "127.0.0.1:0", "api_key": "right"}
    metrics, endpoint = server.serve_gateway_metrics(GatewayOptions(**options))  # type: ignore[arg-type]
    assert endpoint is not None
    metrics.ended(PATH, 200, 0.1)
    try:
        async with aiohttp.ClientSession() as session:
            for key, status in (("wrong", 401), ("right", 200)):
                headers = {"authorization": f"Bearer {key}"}
                url = f"http://{endpoint.address}/metrics"
                async with session.get(url, headers=headers) as response:
                    assert response.status == status
                    text = await response.text()
    finally:
        await asyncio.to_thread(endpoint.close)
    assert f'specdec_gateway_requests_total{{path="{PATH}",status="200"}} 1.0' in text
    assert server.serve_gateway_metrics(GatewayOptions())[1] is None
    GatewayOptions(metrics_address="0.0.0.0:0", insecure_metrics=True)


@pytest.mark.parametrize(("key", "status"), [("right", 200), ("wrong", 401)])
async def test_metrics_are_on_the_gateways_port_too(serve: Serve, key: str, status: int) -> None:
    async with serve(MockTransport("x"), key="right", api_key="right") as served:
        await served.openai.completions.create(model="mock", prompt="a")
        headers = {"authorization": f"Bearer {key}"}
        found, _, text = await served.ask("GET", "/metrics", headers=headers)
    assert found == status
    assert (f'path="{PATH}",status="200"}} 1.0' in text) == (status == 200)
