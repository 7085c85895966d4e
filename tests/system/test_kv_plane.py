"""Drafters that read the verifier's memory: no failure of either changes a token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from system_support import (
    EAGER,
    THREADS,
    generate_and,
    make_prompts,
    shared_memory_segments,
)

from paceline.client import Client, DraftOptions, RetryOptions
from paceline.drafter.kv.access import VerifierAccess
from paceline.drafter.kv.errors import KvGone
from paceline.drafter.kv.exchange import KvExchange
from paceline.harness import ServiceProcess
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

TOKENS = 256


@pytest.fixture(scope="module")
def services(
    models: dict[str, Path], sockets: Path
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """A verifier, and a drafter that maps its KV; both run again after each test."""
    target = ["--target", str(models["llama"]), "--dtype", "float32"]
    methods = str(Path(__file__).parent.parent / "drafter")
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), methods]))
    with (
        ServiceProcess(
            "verifier", target, address=f"unix:{sockets}/kv-v", environment=THREADS
        ) as verifier,
        ServiceProcess(
            "drafter",
            ["--load=kv-reader"],
            address=f"unix:{sockets}/kv-d",
            environment={**THREADS, "PYTHONPATH": paths},
        ) as drafter,
    ):
        yield verifier, drafter
        assert verifier.terminate() == 0, "the integrity check failed"


def client_of(
    services: tuple[ServiceProcess, ServiceProcess], drafting: DraftOptions = EAGER
) -> Client:
    """One whose generations wait for their reader, and which waits for a restart."""
    verifier, drafter = services
    return Client(
        verifier.address,
        drafter=drafter.address,
        drafting=drafting,
        retry=RetryOptions(budget=300),
        unread_chunks=2,
    )


async def test_the_drafter_stalls_or_dies(services: tuple[ServiceProcess, ServiceProcess]) -> None:
    """Stopped while it maps a cache, then killed: the verifier frees the memory."""
    _, drafter = services
    (prompt,) = make_prompts(1, seed=7)
    before = shared_memory_segments()
    impatient = DraftOptions(first_delay=0.01, longest_delay=0.05, adaptive=False)
    async with client_of(services, impatient) as client:
        expected = await generate_and(client, prompt, "none", TOKENS)

        def stall() -> None:
            os.kill(drafter.pid, signal.SIGSTOP)

        text = await generate_and(client, prompt, "kv-reader", TOKENS, stall)
        assert text.token_ids == expected.token_ids
        assert shared_memory_segments() == before, "freed while the drafter holds it"
        os.kill(drafter.pid, signal.SIGCONT)
        text = await generate_and(client, prompt, "kv-reader", TOKENS, drafter.kill)
        assert text.token_ids == expected.token_ids
        assert shared_memory_segments() == before
    drafter.start()


async def test_a_mapping_outlives_its_verifier(
    services: tuple[ServiceProcess, ServiceProcess],
) -> None:
    verifier, _ = services
    (prompt,) = make_prompts(1, seed=8)
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=prompt)
        messages = [message async for message in stub.CreateCache(request)]
    exchange = KvExchange(VerifierAccess())
    grant = messages[-1].created.read_grant
    kv = await exchange.map_cache(verifier.address, grant, (0, -1))
    await exchange.close()
    kv.check()
    keys, _ = kv.layer(-1)
    assert kv.committed == len(prompt)
    copy = keys[:, : kv.committed].clone()
    verifier.kill()
    with pytest.raises(KvGone, match="verifier of the cache has ended"):
        kv.check()
    assert keys[:, : kv.committed].equal(copy)
    verifier.start()  # it sweeps what the dead one left
    assert kv.committed == len(prompt)
    assert keys[:, : kv.committed].equal(copy)
    kv.close()
