"""Idle connections make room for new ones, and leave those with a call alone."""

from contextlib import AsyncExitStack

import grpc
import psutil
import pytest
from calls import until

from paceline.service import limits

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
