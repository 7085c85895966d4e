"""Idle connections make room for new ones, and leave those with a call alone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import psutil
import pytest
from calls import until

from paceline.service import limits
from paceline.service.connections import ServerConnections

from .conftest import Serve
from .toy import ask, echo, open_stream


def connected(address: str) -> int:
    """Connections that a server in this process has."""
    port = int(address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in found)


async def test_idle_connections_make_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 8)
    monkeypatch.setattr(limits, "CONNECTIONS_SECONDS", 0.05)
    served = await serve("127.0.0.1:0")
    async with AsyncExitStack() as opened:

        async def caller() -> grpc.aio.Channel:
            own = {"grpc.use_local_subchannel_pool": 1}
            return await opened.enter_async_context(served.channel(**own))

        running = await open_stream(await caller())
        idle = [await caller() for _ in range(30)]
        for channel in idle:
            assert await ask(channel, "UnaryUnary", "hello") == "hello"
        await until(lambda: connected(served.address) <= 8)
        assert await ask(await caller(), "UnaryUnary", "new") == "new"
        await echo(running, "still there")
        assert await ask(idle[0], "UnaryUnary", "again") == "again", "it connects again"


async def test_the_connection_that_was_unused_for_longest_goes_first() -> None:
    ended: list[int] = []
    came = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    callers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for _ in range(4):
        came.clear()
        callers.append(await asyncio.open_connection("127.0.0.1", port))
        await came.wait()
        await asyncio.sleep(0.02)
    callers[1][1].write(b"I am here")
    await asyncio.sleep(0.02)

    async def wait(number: int) -> None:
        await callers[number][0].read()
        ended.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(4)]
    connections = ServerConnections()
    with connections.in_call(callers[0][1].get_extra_info("sockname")[1]):
        for most, expected in ((4, []), (3, [2]), (2, [2, 3]), (1, [2, 3, 1])):
            connections._close_unused(port, most)
            await until(lambda expected=expected: ended == expected)
    connections._close_unused(port, 0)
    await asyncio.gather(*waiting)
    assert ended == [2, 3, 1, 0]
    server.close()
    for _, writer in callers:
        writer.close()
