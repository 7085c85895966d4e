"""What a served verifier leaves behind when clients vanish or memory runs out: nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any

import drafters
import grpc
import pytest
from verifier_support import Client, Round, failure, reason_of, serving, until

from paceline.v1 import verifier_pb2
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.kv.segment import Segment, own_segments

PROMPT = [3, 1, 4, 1, 5]


async def test_abandoned_caches_go_with_their_lease(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28, lease_seconds=0.3) as client:
        created = await client.create(PROMPT)
        assert created.lease_ms == 300
        stream = client.stub.Verify()
        await stream.write(Round.of(created.handle, 1))
        await stream.read()
        await until(lambda: len(client.service.store) == 0)
        assert own_segments() == set()
        await stream.write(Round.of(created.handle, 2))
        error = await failure(stream)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")


async def test_a_lease_lasts_through_a_long_prefill(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six pieces of prompt, each longer than a lease."""
    async with serving(
        model, tmp_path / "v.sock", kv_bytes=1 << 28, lease_seconds=0.05, prefill_token_limit=256
    ) as client:
        engine = client.service.engine
        forward = engine._decoder.forward

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.1)
            return forward(*args, **kwargs)

        monkeypatch.setattr(engine._decoder, "forward", slow)
        created, progress = await client.create_watched([1] * 1500)
        assert len(progress) == 5
        await client.release(created.handle)


async def test_cancelling_a_prefill_frees_it(model: Path, tmp_path: Path) -> None:
    async with serving(
        model, tmp_path / "v.sock", kv_bytes=1 << 28, prefill_token_limit=32
    ) as client:
        call = client.stub.CreateCache(verifier_pb2.CreateCacheRequest(prompt_tokens=[1] * 2000))
        await call.read()
        call.cancel()
        await until(lambda: len(client.service.store) == 0)
        await client.service.check_integrity()


async def test_no_shared_memory_left(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prefill and in a round: RESOURCE_EXHAUSTED, others go on, and so does the same cache."""
    fields = {"max_new_tokens": 300, "ignore_eos": True}
    plain = await client.generate(PROMPT, drafters.nothing, **fields)
    created = await client.create(PROMPT, **fields)
    real = os.posix_fallocate

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    request = verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT)
    error = await failure(client.stub.CreateCache(request))
    assert (error.code(), reason_of(error)) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "KV_FULL",
    )
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1, free_run_steps=299))
    tokens = list(created.first.tokens)
    while len(PROMPT) + len(tokens) < 257:
        answer = await stream.read()
        assert not answer.last
        tokens += answer.result.tokens
    assert (await failure(stream)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokens == plain[: len(tokens)]
    assert len(PROMPT) + len(tokens) == 257, "up to the last slot that was reserved"
    monkeypatch.setattr(os, "posix_fallocate", real)
    stream = client.stub.Verify()
    await stream.write(Round.of(created.handle, 1))
    assert [*created.first.tokens, *(await stream.read()).result.tokens] == tokens
    await stream.write(Round.of(created.handle, 2, free_run_steps=299))
    while not answer.last:
        answer = await stream.read()
        tokens += answer.result.tokens
    assert tokens == plain
    await client.release(created.handle)


async def test_who_cannot_grow_leaves_its_memory_to_older_ones(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four that all need more than there is: one after the other, the youngest first, gives way."""
    fields = {"max_new_tokens": 300, "ignore_eos": True}
    caches = [await client.create(PROMPT, **fields) for _ in range(4)]
    real = Segment.reserve

    def full(segment: Segment, tokens: int) -> None:
        if tokens > 256 and len(own_segments()) > 1:
            raise OutOfMemory("no room")
        real(segment, tokens)

    monkeypatch.setattr(Segment, "reserve", full)

    async def run(handle: bytes) -> grpc.StatusCode:
        """Go on to the end; the status that it came to."""
        stream = client.stub.Verify()
        await stream.write(Round.of(handle, 1, free_run_steps=299))
        try:
            while not (await stream.read()).last:
                pass
            await stream.done_writing()
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await stream.code()

    for cache in reversed(caches[1:]):
        assert await run(cache.handle) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await run(cache.handle) == grpc.StatusCode.NOT_FOUND
    assert await run(caches[0].handle) == grpc.StatusCode.OK
    await client.release(caches[0].handle)


async def test_nothing_leaks_under_churn(client: Client) -> None:
    """Generations that end, are cancelled at any point, or are released by others."""
    fields = {"max_new_tokens": 25, "ignore_eos": True}
    plain = await client.generate(PROMPT, drafters.nothing, **fields)

    async def churn(index: int) -> None:
        draw = drafters.mixed(drafters.random_tree, drafters.free_run)
        task = asyncio.create_task(client.generate(PROMPT, draw, seed=index, **fields))
        if index % 3 == 0:
            await asyncio.sleep(0.002 * index)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            assert await task == plain

    await asyncio.gather(*(churn(index) for index in range(24)))
    for cache in client.service.store:  # of cancelled clients, before their leases end
        await client.release(cache.handle)
    await until(lambda: not any(cache.busy for cache in client.service.store))
    await client.service.check_integrity()
    assert len(client.service.store) == 0
