"""A step that fails is run again for each of its jobs alone: only those at fault end."""

import asyncio
import math
import threading
from typing import Any

import grpc
import pytest
import torch
from calls import failure, reason_of, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from verifier_support import Client, Serve, paused_engine

from paceline.decoder import Decoder
from paceline.device import Device, DeviceLost
from paceline.kv.selection import AttentionScores
from paceline.service import watchdog
from paceline.tree import TokenTree
from paceline.v1 import sampling_pb2, verifier_pb2
from paceline.verifier.kv.segment import Segment

POISON = 59
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5, 3, 5]]
STEP_FAILED = (grpc.StatusCode.INTERNAL, "STEP_FAILED")


def fields(seed: int) -> dict[str, Any]:
    """No text emits ``POISON``."""
    sampling = sampling_pb2.SamplingParams(
        temperature=seed * 0.5, seed=seed, presence_penalty=seed, logit_bias={POISON: -1e4}
    )
    return {"sampling": sampling, "max_new_tokens": 300, "ignore_eos": True}


@pytest.mark.parametrize("fault", ["a prompt", "a draft"])
async def test_only_the_sequence_at_fault_ends(
    fault: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of its batch have their own tokens and scores; after a bad draft it goes on too."""
    forward, failed = Decoder.forward, list[int]()

    def poisoned(
        decoder: Decoder, tokens: torch.Tensor, plan: Any, caches: Any, **options: Any
    ) -> Any:
        # As a fault in a late layer: keys, values and scores of the batch are written by then.
        output = forward(decoder, tokens, plan, caches, **options)
        if POISON in tokens:
            failed.append(len(caches))
            raise RuntimeError("a bad token")
        return output

    async def fails(call: Any) -> None:
        error = await failure(call)
        assert (error.code(), reason_of(error)) == STEP_FAILED
        assert "a bad token" in str(error.details())

    service = client.drafter_service
    name = await service.add(lambda *_: TokenTree.chain([POISON]))

    async def run(*, disturbed: bool) -> tuple[list[list[int]], list[Any]]:
        created = [await client.create(p, **fields(seed)) for seed, p in enumerate(PROMPTS)]
        caches = list(client.service.store)
        observers = [AttentionScores(each.sequence.kv, [0, 1]) for each in caches]
        for cache, observer in zip(caches, observers, strict=True):
            cache.sequence.observers.append(observer)
        bad = await client.create([7, 7, 7], **fields(0))
        service.paused = []
        call = await client.begin(bad.handle, credits=1, drafter=name)
        await until(lambda: bool(service.paused))
        with paused_engine(after=5) as paused:
            rest = [asyncio.create_task(client.rest(each.handle)) for each in created]
            await paused()
            if disturbed and fault == "a draft":
                await service.answer()
            elif disturbed:
                request = verifier_pb2.CreateCacheRequest(prompt_tokens=[POISON], **fields(0))
                failing = asyncio.create_task(fails(client.stub.CreateCache(request)))
                await until(lambda: len(list(client.service.store)) == 5)
        texts = [await each for each in rest]
        if disturbed:
            await (fails(call) if fault == "a draft" else failing)
        call.cancel()
        assert len(await client.rest(bad.handle)) == 299
        for each in (*created, bad):
            await client.release(each.handle)
        return texts, [observer.scores for observer in observers]

    monkeypatch.setattr(Decoder, "forward", poisoned)
    plain, scores = await run(disturbed=False)
    texts, again = await run(disturbed=True)
    assert texts == plain
    assert all(map(torch.equal, again, scores))
    assert failed[0] > failed[-1] == 1, "in a batch, and then alone"


async def test_a_lost_device_ends_the_verifier(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed step the device is checked; health is NOT_SERVING before the server stops."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    lost = pytest.raises(DeviceLost, match="fails every call")
    with lost:
        async with serve() as client:
            health = health_pb2_grpc.HealthStub(client.channel).Watch(
                health_pb2.HealthCheckRequest(service="paceline.v1.VerifierService")
            )
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            monkeypatch.setattr(Decoder, "forward", fail)
            with pytest.raises(grpc.aio.AioRpcError, match="illegal memory access"):
                await client.create([3, 1, 4])
            call = client.stub.GetModel(verifier_pb2.GetModelRequest())
            assert (await call).name == "Llama", "a step may fail without the device"
            monkeypatch.setattr(
                Device, "lost", lambda device: DeviceLost("the GPU fails every call")
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await client.create([3, 1, 4])
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_step_that_hangs_ends_the_process(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU; on the CPU a step may take any time."""
    engine: Any = client.service.engine
    assert engine._watchdog.limit == math.inf
    exits: list[int] = []
    hanging, forward = threading.Event(), Decoder.forward

    def hang(*arguments: Any, **options: Any) -> Any:
        hanging.wait(60.0)
        return forward(*arguments, **options)

    def exit_(status: int) -> None:
        exits.append(status)
        hanging.set()

    monkeypatch.setattr(watchdog.os, "_exit", exit_)
    monkeypatch.setattr(watchdog, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(watchdog.logging, "shutdown", lambda: None)
    monkeypatch.setattr(engine._watchdog, "limit", 0.3)
    monkeypatch.setattr(Decoder, "forward", hang)
    watching = asyncio.create_task(client.service.fault())
    try:
        created = await client.create([3, 1, 4])
    finally:
        hanging.set()
        watching.cancel()
    await client.release(created.handle)
    assert set(exits) == {watchdog.EXIT_HUNG}
    assert "a step on cpu has not ended after 0.3 s: the service ends" in caplog.text


async def test_a_prefix_that_cannot_be_copied_is_an_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told, and does not wait for ever; others are served."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no copy")

    async with serve() as client:
        parent = await client.create([3, 1, 4])
        with monkeypatch.context() as broken:
            broken.setattr(Segment, "copy_prefix", fail)
            with pytest.raises(grpc.aio.AioRpcError, match="could not be prepared: no copy"):
                await client.create([3, 1, 5], parent_handle=parent.handle)
        await client.create([3, 1, 5], parent_handle=parent.handle)
