"""Many connections to a gateway process, and a verifier whose process may open few files."""

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from calls import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI
from system_support import generate_all, make_prompts

from paceline.client import Client
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


FEW = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def verifier(models: dict[str, Path]) -> Iterator[ServiceProcess]:
    target = ["--target", str(models["llama"]), "--weights", "float32", "--schedule", "off"]
    with ServiceProcess("verifier", target, wrapper=FEW) as process:
        yield process


def health(channel: grpc.Channel) -> int:
    """What the health service says; without an answer, that it does not serve."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)
    except grpc.RpcError:
        return int(NOT_SERVING)


async def test_more_texts_than_files(verifier: ServiceProcess) -> None:
    """KV of ended texts is kept, but leaves files for new ones."""
    async with Client(verifier.address, cache_dir=None) as client:
        for number in range(64):
            prompt = [number, *range(70)]  # long enough to be kept
            assert (await client.generate(prompt, max_new_tokens=2, ignore_eos=True)).token_ids
        results = await generate_all(client, make_prompts(40), "none", 4)
        assert [len(result.token_ids) for result in results] == [4] * 40
        with grpc.insecure_channel(verifier.address) as channel:
            assert health(channel) == SERVING


async def test_health_says_when_no_file_can_be_opened(verifier: ServiceProcess) -> None:
    limits = resource.prlimit(verifier.pid, resource.RLIMIT_NOFILE)
    assert limits == (128, 128)
    with grpc.insecure_channel(verifier.address) as channel:
        assert health(channel) == SERVING
        # Connections of callers are bounded, so something else takes the files.
        resource.prlimit(
            verifier.pid,
            resource.RLIMIT_NOFILE,
            (len(os.listdir(f"/proc/{verifier.pid}/fd")) + 1, 128),
        )
        await asyncio.to_thread(
            eventually, lambda: health(channel) == NOT_SERVING, "health says so"
        )
        resource.prlimit(verifier.pid, resource.RLIMIT_NOFILE, limits)
        await asyncio.to_thread(eventually, lambda: health(channel) == SERVING, "it serves again")
