"""What surrounds requests: ids, CORS, the access log, comments of slow streams."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import openai
import pytest
from fakes.transport import MockTransport
from yarl import URL

from paceline.service.runtime import JsonFormatter, TextFormatter
from paceline.v1 import verifier_pb2

from .conftest import Serve, Served


class SlowTransport(MockTransport):
    """Prefills when it is told to."""

    def __init__(self) -> None:
        super().__init__("x")
        self.prefill = asyncio.Event()

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        await self.prefill.wait()
        async for response in super().create_cache(request):
            yield response


async def test_a_request_has_an_id(serve: Serve) -> None:
    async with serve(MockTransport("x")) as served, aiohttp.ClientSession() as session:
        for given, kept in (("mine-1", True), ("", False), ("x" * 200, False)):
            headers = {"x-request-id": given}
            async with session.get(f"{served.url}/v1/models", headers=headers) as response:
                assert (response.headers["x-request-id"] == given) == kept
                assert response.headers["x-request-id"]
        async with session.get(f"{served.url}/nowhere") as response:
            assert response.headers["x-request-id"].startswith("req_")


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
PAGE = "https://page.example"


async def asked(served: Served, method: str, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        url = f"{served.url}/v1/completions"
        body = {"json": {"prompt": "a"}} if method == "POST" else {}
        async with session.request(method, url, headers=headers, **body) as response:
            return response.status, response.headers


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
        for path in ("", "health", "version", "metrics", "v1/models"):
            async with aiohttp.ClientSession(headers={"Host": host}) as session:
                async with session.get(f"{served.url}/{path}") as response:
                    assert (response.status == 403) == (status == 403)


async def test_the_access_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline.gateway.access")
    async with serve(MockTransport("abc"), key="a", api_key="a") as served:
        await served.openai.completions.create(model="mock", prompt="hello")
        with pytest.raises(openai.AuthenticationError):
            await served.openai.with_options(api_key="wrong").models.list()
        async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health"):
            pass
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
    async with serve(MockTransport("x")) as served, aiohttp.ClientSession() as session:
        for path in ("/v1/x%0a12:00:00 INFO GET", "/v1/%1b[2J", "/v1/%c2%9b2J", "/%e2%80%ae"):
            url = URL(f"{served.url}{path.replace(' ', '%20')}", encoded=True)
            async with session.get(url) as response:
                assert response.status == 404
    lines = [form.format(record) for record in caplog.records if "access" in record.name]
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines), lines


async def test_a_slow_stream_gets_comments(serve: Serve) -> None:
    transport = SlowTransport()
    async with serve(transport, keep_alive_seconds=0.01) as served:
        body = {"model": "mock", "prompt": "a", "stream": True}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{served.url}/v1/completions", json=body) as response:
                assert await response.content.readline() == b": keep-alive\n"
                transport.prefill.set()
                assert b"[DONE]" in await response.content.read()
        # Clients skip them.
        stream = await served.openai.completions.create(model="mock", prompt="a", stream=True)
        assert "".join([event.choices[0].text async for event in stream]) == "x"


async def test_the_version_needs_no_key(serve: Serve) -> None:
    async with serve(MockTransport("x"), key="k", api_key="k") as served:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{served.url}/version") as response:
                assert (await response.json())["version"]
