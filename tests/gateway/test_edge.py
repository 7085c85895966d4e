"""What surrounds requests: ids, CORS, the access log, limits of keys, comments of slow streams."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import openai
import pytest
from mock_transport import MockTransport
from openai import AsyncOpenAI

from paceline.gateway import ApiKey, GatewayOptions, read_keys
from paceline.gateway.errors import ApiError
from paceline.gateway.middleware import Caller
from paceline.service.options import OptionsError
from paceline.v1 import verifier_pb2

from .conftest import Serve


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


async def test_pages_of_other_origins(serve: Serve) -> None:
    origin = "https://page.example"
    preflight = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with aiohttp.ClientSession() as session:
        async with serve(MockTransport("x"), key="k", api_key="k", cors_origins=(origin,)) as on:
            url = f"{on.url}/v1/completions"
            async with session.options(url, headers=preflight) as response:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Origin"] == origin
                assert "authorization" in response.headers["Access-Control-Allow-Headers"]
            async with session.options(url, headers={**preflight, "Origin": "null"}) as response:
                assert "Access-Control-Allow-Origin" not in response.headers
            # Errors can be read too.
            async with session.post(url, json={}, headers={"Origin": origin}) as response:
                assert response.status == 401
                assert response.headers["Access-Control-Allow-Origin"] == origin
        async with serve(MockTransport("x")) as off:
            async with session.options(f"{off.url}/v1/completions", headers=preflight) as response:
                assert response.status == 405
                assert "Access-Control-Allow-Origin" not in response.headers


async def test_the_access_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline.gateway.access")
    keys = (ApiKey(name="alice", key="a"),)
    async with serve(MockTransport("abc"), key="a", api_keys=keys) as served:
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
    assert (first["key"], first["prompt_tokens"], first["completion_tokens"]) == ("alice", 5, 4)
    assert second["key"] == "-"


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


async def test_keys_have_limits_of_their_own(serve: Serve) -> None:
    keys = (
        ApiKey(name="few", key="few", requests_per_minute=1),
        ApiKey(name="short", key="short", tokens_per_minute=4),
        ApiKey(name="free", key="free"),
    )
    async with serve(MockTransport("abc"), api_keys=keys) as served:
        for name, limit in (("few", "1 requests"), ("short", "4 tokens"), ("free", None)):
            url = f"{served.url}/v1"
            async with AsyncOpenAI(base_url=url, api_key=name, max_retries=0) as api:
                await api.completions.create(model="mock", prompt="hello")
                if limit is None:
                    await api.completions.create(model="mock", prompt="hello")
                    continue
                with pytest.raises(openai.RateLimitError, match=limit) as raised:
                    await api.completions.create(model="mock", prompt="hello")
                assert int(raised.value.response.headers["Retry-After"]) >= 1
                await api.models.list()  # no generation: not limited


def test_limits_are_refilled_in_a_minute() -> None:
    now = 0.0
    caller = Caller(
        ApiKey(name="n", key="k", requests_per_minute=2, tokens_per_minute=60), lambda: now
    )
    caller.admit(0, 10)
    caller.spend(90)  # more than a minute has
    with pytest.raises(ApiError) as raised:
        caller.admit(0, 10)
    assert raised.value.headers["Retry-After"] == "31"
    now = 31.0
    caller.admit(0, 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("{}", "array"),
        ("[]", "at least one"),
        ('[{"name": "a"}]', "key"),
        ('[{"name": "a", "key": "k"}, {"name": "b", "key": "k"}]', "twice"),
        ('[{"name": "a", "key": "k", "priority": "high"}]', "priority"),
        ('[{"name": "a", "key": "\\n"}]', "headers"),
    ],
)
def test_wrong_files_of_keys(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(OptionsError, match=message):
        read_keys(tmp_path / "keys")
    with pytest.raises(OptionsError, match="cannot read"):
        read_keys(tmp_path / "none")


def test_a_file_of_keys_secures_a_gateway(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(json.dumps([{"name": "a", "key": "k"}]))
    keys = read_keys(tmp_path / "keys")
    pem = tmp_path / "pem"
    GatewayOptions(address="0.0.0.0:0", tls_cert=pem, tls_key=pem, api_keys=keys)
    with pytest.raises(OptionsError, match="--insecure"):
        GatewayOptions(address="0.0.0.0:0", tls_cert=pem, tls_key=pem)


async def test_the_version_needs_no_key(serve: Serve) -> None:
    async with serve(MockTransport("x"), key="k", api_key="k") as served:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{served.url}/version") as response:
                assert (await response.json())["version"]
