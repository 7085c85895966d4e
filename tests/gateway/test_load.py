"""Callers that read nothing, or never finish a request."""

import asyncio
import json
import socket

import pytest
from calls import until
from fakes.transport import MockTransport

from paceline.gateway import server, writers
from paceline.service import limits

from .conftest import Serve, Served

TEXT = "x" * 50_000


async def reading_nothing(served: Served, **body: object) -> socket.socket:
    """A connection with a request, and a small buffer for the response."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps({"model": "mock", "prompt": "a", "max_tokens": len(TEXT), **body})
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(caller, (host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    await loop.sock_sendall(caller, f"{head}{content}".encode())
    return caller


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_reads_nothing_is_disconnected(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(writers, "STALLED_SECONDS", 0.2)
    async with serve(MockTransport(TEXT), max_requests=1) as served:
        # A whole response is as long with log-probabilities as a stream.
        caller = await reading_nothing(served, stream=stream, logprobs=0)
        await until(lambda: len(served.transport.requests) == 1)
        await until(lambda: served.transport.open_caches == 0)
        # Its place is free again.
        create = served.openai.with_options(max_retries=5).completions.create
        answer = await create(model="mock", prompt="a", max_tokens=1)
        assert answer.choices[0].text == "x"
        caller.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localho"])
async def test_a_connection_without_a_request_is_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    async with serve(MockTransport("x")) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_idle_connections_make_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """For new ones; that of a text goes on."""
    monkeypatch.setattr(limits, "CONNECTIONS", 8)
    monkeypatch.setattr(limits, "CONNECTIONS_SECONDS", 0.05)
    async with serve(MockTransport(TEXT)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reading = await reading_nothing(served, stream=True)
        await until(lambda: len(served.transport.requests) == 1)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(30)]
        for reader, writer in silent[:20]:
            assert not await asyncio.wait_for(reader.read(), 60)
            writer.close()
        answer = await served.openai.completions.create(model="mock", prompt="a", max_tokens=1)
        assert answer.choices[0].text == "x"
        assert await asyncio.get_running_loop().sock_recv(reading, 12) == b"HTTP/1.1 200"
        reading.close()
        for _, writer in silent[20:]:
            writer.close()
