"""What surrounds requests: ids, CORS, the access log, comments of slow streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import aiohttp
import openai
import pytest
from mock_transport import MockTransport

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
