"""A verifier whose process may open few files."""

import asyncio
import os
import resource
from pathlib import Path

import grpc
import pytest
from calls import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from system_support import generate_all, make_prompts

from paceline.client import Client
from paceline.harness import ServiceProcess

FEW = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def verifier(models: dict[str, Path]) -> ServiceProcess:
    target = ["--target", str(models["llama"]), "--weights", "float32", "--schedule", "off"]
    return ServiceProcess("verifier", target, wrapper=FEW)


def health(channel: grpc.Channel) -> int:
    """What the health service says; without an answer, that it does not serve."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)
    except grpc.RpcError:
        return int(NOT_SERVING)


async def test_more_texts_than_files(verifier: ServiceProcess) -> None:
    """KV of ended texts is kept, but leaves files for new ones."""
    async with verifier, Client(verifier.address, cache_dir=None) as client:
        for number in range(64):
            prompt = [number, *range(70)]  # long enough to be kept
            assert (await client.generate(prompt, max_new_tokens=2, ignore_eos=True)).token_ids
        results = await generate_all(client, make_prompts(40), "none", 4)
        assert [len(result.token_ids) for result in results] == [4] * 40
        with grpc.insecure_channel(verifier.address) as channel:
            assert health(channel) == SERVING


async def test_health_says_when_no_file_can_be_opened(verifier: ServiceProcess) -> None:
    async with verifier:
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
            await asyncio.to_thread(
                eventually, lambda: health(channel) == SERVING, "it serves again"
            )
