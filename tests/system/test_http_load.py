"""Many connections to a gateway process before a real verifier."""

import asyncio
import resource
from collections.abc import Callable

import psutil
import pytest
from openai import AsyncOpenAI

from paceline.harness import ServiceProcess

CONNECTIONS = 1000
MAX_GROWTH = 64 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# What connections have sent: nothing, a part of a head, a part of a body.
STATES = (b"", HEAD[:40], HEAD + b"Content-Length: 100\r\n\r\n{")


async def test_a_thousand_idle_and_half_open_connections(
    verifiers: Callable[[str], ServiceProcess],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CONNECTIONS:
        pytest.skip(f"only {hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    verifier = verifiers("llama")
    # A soft limit below the number of connections, as many systems have.
    few = ("sh", "-c", 'ulimit -Sn 512; exec "$@"', "sh")
    arguments = ["--verifier-address", verifier.address]
    connections = []
    try:
        async with (
            ServiceProcess("gateway", arguments, wrapper=few) as gateway,
            AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="-", max_retries=0) as api,
        ):

            async def text() -> str:
                answer = await api.completions.create(model="llama", prompt="a", temperature=0)
                return answer.choices[0].text

            expected = await text()
            memory = psutil.Process(gateway.pid).memory_info
            before = memory().rss
            host, port = gateway.address.split(":")
            for index in range(CONNECTIONS):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(STATES[index % len(STATES)])
                connections.append((reader, writer))
            for _ in range(10):
                assert await text() == expected
            assert memory().rss - before < MAX_GROWTH
            for _, writer in connections:
                writer.close()
            assert await text() == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
