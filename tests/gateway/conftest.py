"""A gateway in this process, on a real socket, before a verifier made of memory."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from calls import started
from fakes.transport import MockTransport
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from yarl import URL

from paceline.client import Client, RetryOptions
from paceline.gateway import GatewayOptions, OneModel, run_gateway


@dataclass
class Served:
    openai: AsyncOpenAI
    transport: MockTransport
    url: str
    stop: asyncio.Event  # set it to begin the drain
    server: asyncio.Task[None]

    async def ask(self, method: str, path: str, **given: Any) -> tuple[int, Any, str]:
        """Status, headers and text of the response to a request that no client would send."""
        url = URL(f"{self.url}{path}", encoded=True)
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            async with session.request(method, url, **given) as response:
                return response.status, response.headers, await response.text()

    async def post(self, path: str, **body: Any) -> tuple[int, Any, Any]:
        status, headers, text = await self.ask("POST", path, json=body)
        return status, headers, json.loads(text)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@contextlib.asynccontextmanager
async def serve_gateway(
    transport: MockTransport, key: str = "any", **options: Any
) -> AsyncIterator[Served]:
    gateway, retry = GatewayOptions(**{"address": "127.0.0.1:0"} | options), RetryOptions(budget=0)
    async with (
        Client(transport=transport, cache_dir=None, retry=retry, unread_chunks=4) as client,
        started(run_gateway, OneModel(client), gateway) as (address, stop, server),
    ):
        url = f"http://127.0.0.1:{address.rpartition(':')[2]}"
        plain = DefaultAsyncHttpxClient(verify=False)  # reads no certificates, which takes long
        given: Any = {"api_key": key, "max_retries": 0, "http_client": plain}
        async with AsyncOpenAI(base_url=f"{url}/v1", **given) as openai:
            yield Served(openai, transport, url, stop, server)


@pytest.fixture
async def served(serve: Serve, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A gateway with the TEMPLATE of the test's module, whose model answers its REPLY."""
    transport = MockTransport(request.module.REPLY)
    async with serve(transport, chat_template=request.module.TEMPLATE) as served:
        yield served


@pytest.fixture
def serve() -> Serve:
    """Starts a gateway: `serve(transport, key="what the client sends", **GatewayOptions)`."""
    return serve_gateway
