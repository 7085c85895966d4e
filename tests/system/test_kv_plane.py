"""Drafters that read the verifier's memory: nothing that befalls either changes a token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from system_support import EAGER, make_prompts, shared_memory_segments

from paceline.cli.processes import ServiceProcess
from paceline.client import Client, DraftOptions, GenerationResult
from paceline.drafter.kv import KvExchange, KvGone, VerifierAccess
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

TOKENS = 64


def verifier(models: dict[str, Path], *arguments: str) -> ServiceProcess:
    """It says with its exit code if its books do not balance at the end."""
    given = ["--target", str(models["llama"]), "--dtype", "float32", *arguments]
    return ServiceProcess("verifier", given, environment={"OMP_NUM_THREADS": "1"})


def drafting() -> ServiceProcess:
    methods = str(Path(__file__).parent.parent / "drafter")
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), methods]))
    arguments = ["--allow-test-methods", "--test-method", "kv-reader=kv_reader:KvReader"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return ServiceProcess("drafter", [*arguments, "--load=kv-reader"], environment=environment)


async def generate(
    client: Client, prompt: list[int], drafter: str, act: Callable[[], None] | None = None
) -> GenerationResult:
    """A sampled text; ``act`` (blocking) runs in the middle of it."""
    generation = client.generate(
        prompt, max_new_tokens=TOKENS, temperature=1.0, seed=3, drafter=drafter
    )
    seen = 0
    async for chunk in generation:
        seen += len(chunk.token_ids)
        if act is not None and seen >= TOKENS // 3:
            await asyncio.to_thread(act)
            act = None
    assert act is None
    return await generation


async def test_a_drafter_in_its_own_process_reads_it(models: dict[str, Path]) -> None:
    """Many texts at once; as each ends, so do its mapping and its memory."""
    prompts = make_prompts(6, seed=5)
    with verifier(models) as served, drafting() as drafter:
        async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:
            plain = [await generate(client, prompt, "none") for prompt in prompts]
            texts = await asyncio.gather(
                *(generate(client, prompt, "kv-reader") for prompt in prompts)
            )
            for text, expected in zip(texts, plain, strict=True):
                assert text.token_ids == expected.token_ids
                assert text.stats.drafter_versions == ["kv-reader@1"]
                assert not text.stats.fallbacks
                assert text.stats.drafted > 0


async def test_the_verifier_dies_and_comes_back(models: dict[str, Path]) -> None:
    """The drafter lives on, and reads the new verifier's memory."""
    (prompt,) = make_prompts(1, seed=6)
    options = DraftOptions(first_delay=0.01, longest_delay=0.05, adaptive=False)
    with verifier(models) as served, drafting() as drafter:
        async with Client(served.address, drafter=drafter.address, drafting=options) as client:
            expected = await generate(client, prompt, "none")

            def kill_and_restart() -> None:
                served.kill()
                served.restart_same_address()

            text = await generate(client, prompt, "kv-reader", kill_and_restart)
            assert text.token_ids == expected.token_ids
            again = await generate(client, prompt, "kv-reader")
            assert again.token_ids == expected.token_ids
            assert again.stats.drafter_versions == ["kv-reader@1"]
            assert drafter.returncode is None


async def test_the_drafter_stalls_or_dies(models: dict[str, Path]) -> None:
    """Stopped with a mapping in its hands, then killed: the verifier frees all the same."""
    (prompt,) = make_prompts(1, seed=7)
    before = shared_memory_segments()
    with verifier(models) as served, drafting() as drafter:
        async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:
            expected = await generate(client, prompt, "none")

            def stall() -> None:
                os.kill(drafter.pid, signal.SIGSTOP)

            text = await generate(client, prompt, "kv-reader", stall)
            assert text.token_ids == expected.token_ids
            assert shared_memory_segments() == before, "freed while the drafter holds it"
            os.kill(drafter.pid, signal.SIGCONT)
            text = await generate(client, prompt, "kv-reader", drafter.kill)
            assert text.token_ids == expected.token_ids
            assert shared_memory_segments() == before


async def test_a_mapping_outlives_its_verifier(models: dict[str, Path]) -> None:
    (prompt,) = make_prompts(1, seed=8)
    with verifier(models) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            request = verifier_pb2.CreateCacheRequest(prompt_tokens=prompt)
            messages = [message async for message in stub.CreateCache(request)]
        exchange = KvExchange(VerifierAccess())
        grant = messages[-1].created.read_grant
        kv = await exchange.map_cache(served.address, grant, (0, -1))
        await exchange.close()
        kv.check()
        keys, _ = kv.layer(-1)
        assert kv.committed == len(prompt)
        copy = keys[:, : kv.committed].clone()
        served.kill()
        with pytest.raises(KvGone, match="verifier that held the cache is gone"):
            kv.check()
        assert keys[:, : kv.committed].equal(copy)
        served.restart_same_address()  # it sweeps what the dead one left
        assert kv.committed == len(prompt)
        assert keys[:, : kv.committed].equal(copy)
        kv.close()
