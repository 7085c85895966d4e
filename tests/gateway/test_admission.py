"""Which requests come in: bodies that do not end, memory, callers that read nothing, the drain."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from calls import until
from fakes.transport import MockTransport

from paceline.client import _fleet
from paceline.gateway import admission, server, writers

from .conftest import Serve, Served

BODY = 1 << 20
ROUTES = ["completions", "chat/completions", "responses", "models", "models/mock", "nothing"]


class Upload:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(60):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            content = await self._reader.readexactly(int(headers["Content-Length"]))
        return int(head[0].split()[1]), headers, json.loads(content)

    async def refused(self) -> bool:
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.create_task(self._peek())), 0.2)
        except TimeoutError:
            return False
        return True

    async def _peek(self) -> None:
        while not self._reader._buffer:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def upload(served: Served, length: int = BODY, sent: int = 1) -> AsyncIterator[Upload]:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{HEAD}Content-Length: {length}\r\n\r\n".encode())
    made = Upload(reader, writer)
    await made.send(b" " * sent)
    try:
        yield made
    finally:
        writer.close()


async def text(served: Served) -> int:
    return (await served.post("/v1/completions", prompt="a", max_tokens=1))[0]


async def test_bodies_that_do_not_end_keep_nobody_out(serve: Serve) -> None:
    async with serve(MockTransport("x"), max_requests=2) as served:
        async with upload(served) as first, upload(served) as second, upload(served) as third:
            # The oldest one gave up its place for the third, and the second does for a text.
            status, headers, body = await first.answer()
            assert (status, headers["Retry-After"]) == (429, "1")
            assert body["error"]["code"] == "too_many_requests"
            for _ in range(3):
                assert await text(served) == 200
            assert (await second.answer())[0] == 429
            assert not await third.refused() or (await third.answer())[0] == 429


async def test_bodies_take_bounded_memory(serve: Serve) -> None:
    """The oldest unfinished one is refused where there is no memory for another."""
    async with serve(MockTransport("x"), max_body_bytes=BODY) as served:
        async with contextlib.AsyncExitStack() as stack:
            begun = [upload(served, sent=BODY - 1) for _ in range(20)]
            uploads = [await stack.enter_async_context(body) for body in begun]
            fitting = admission.LONG_BODIES
            for each in uploads[: -fitting - 1]:
                status, headers, body = await each.answer()
                assert (status, headers["Retry-After"]) == (503, "1")
                assert body["error"]["code"] == "overloaded"
            assert not await uploads[-1].refused()
            # Short requests need none of it.
            assert await text(served) == 200
            long = {"prompt": "a", "max_tokens": 1, "metadata": {"a": "x" * (BODY // 2)}}
            assert (await served.post("/v1/completions", **long))[0] == 200
            await uploads[-1].send(b"x")
            assert (await uploads[-1].answer())[0] == 400


async def test_a_slow_body_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_SECONDS", 0.1)
    async with serve(MockTransport("x")) as served, upload(served) as begun:
        assert (await begun.answer())[0] == 408


@pytest.fixture
def asks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks the verifier for its model before each text."""
    monkeypatch.setattr(_fleet, "MAX_AGE", 0.0)


@pytest.mark.usefixtures("asks_each_time")
async def test_a_drain_refuses_every_route_at_once(serve: Serve) -> None:
    """Also while no verifier answers, which may drain as well."""
    transport = MockTransport("x" * 8_000)
    async with serve(transport) as served:
        stream = await served.openai.completions.create(
            model="mock", prompt="a", max_tokens=9_000, stream=True
        )
        await anext(stream)
        transport.may_answer.clear()
        asked = len(transport.models_asked)
        waiting = asyncio.create_task(served.post("/v1/completions", prompt="a"))
        await until(lambda: len(transport.models_asked) > asked)
        async with upload(served) as begun:
            await asyncio.sleep(0.1)
            served.stop.set()
            # Those that wait for a verifier, or whose body has not come, have not begun.
            assert (await waiting)[0] == 503
            assert (await begun.answer())[0] == 503
        for route in ROUTES:
            for method, body in (("GET", {}), ("POST", {"json": {}})):
                status, _, answer = await served.ask(method, f"/v1/{route}", **body)
                assert status == 503
                assert "shutting down" in json.loads(answer)["error"]["message"]
        status, _, answer = await served.ask("GET", "/health")
        assert (status, json.loads(answer)) == (503, {"status": "draining"})
        assert "".join([event.choices[0].text async for event in stream]) == "x" * 8_000
        await served.server


async def test_a_wait_for_a_verifier_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "VERIFIER_SECONDS", 0.1)
    transport = MockTransport("x")
    transport.may_answer.clear()
    async with serve(transport) as served:
        assert await text(served) == 503
        assert (await served.ask("GET", "/v1/models"))[0] == 503


@pytest.mark.usefixtures("asks_each_time")
async def test_a_caller_that_goes_leaves_its_place_at_every_phase(serve: Serve) -> None:
    transport = MockTransport("x")
    async with serve(transport, max_requests=1) as served:
        async with upload(served):
            pass
        await eventually_served(served)
        transport.may_answer.clear()
        asked = len(transport.models_asked)
        call = asyncio.create_task(served.post("/v1/completions", prompt="a"))
        await until(lambda: len(transport.models_asked) > asked)
        call.cancel()
        transport.may_answer.set()
        await eventually_served(served)


async def eventually_served(served: Served) -> None:
    async with asyncio.timeout(60):
        while await text(served) != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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
    request = f"{HEAD}Content-Length: {len(content)}\r\n\r\n{content}"
    await loop.sock_sendall(caller, request.encode())
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
