"""No memory leaks when clients disappear or memory runs out."""

import asyncio
import errno
import os
import random
from pathlib import Path
from typing import Any

import drafters
import grpc
import pytest
from calls import details_of, failure, reason_of, until
from google.rpc import error_details_pb2
from verifier_support import Client, Clock, paused_engine, serving

from paceline.service.metrics import new_registry
from paceline.tree import TokenTree
from paceline.v1 import verifier_pb2
from paceline.verifier.kv.base import OutOfMemory, open_segments
from paceline.verifier.kv.segment import Segment

PROMPT = [3, 1, 4, 1, 5]


async def test_a_lease_lasts_through_a_long_prefill(model: Path, tmp_path: Path) -> None:
    clock = Clock()
    async with serving(
        model, tmp_path / "v.sock", kv_bytes=1 << 28, prefill_token_limit=256, clock=clock
    ) as client:
        for steps in (1, 3):
            with paused_engine(after=steps) as paused:
                creating = asyncio.create_task(client.create([1] * 1500))
                await paused()
                for _ in range(2):
                    clock.now += 30
                    assert await client.service.store.sweep() == 0
            assert await client.release((await creating).handle)


async def test_no_shared_memory_left(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prefill and in a step: RESOURCE_EXHAUSTED; the same cache goes on later."""
    fields: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
    plain = await client.generate(PROMPT, None, **fields)
    created = await client.create(PROMPT, **fields)
    real = os.posix_fallocate

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    request = verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT)
    assert reason_of(await failure(client.stub.CreateCache(request))) == "KV_FULL"
    tokens = list(created.first.tokens)
    call = await client.begin(created.handle, credits=1000)
    while len(PROMPT) + len(tokens) < 257:
        tokens += (await call.read()).result.tokens
    error = await failure(call)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    assert tokens == plain[: len(tokens)]
    assert len(PROMPT) + len(tokens) == 257, "up to the last slot that was reserved"
    monkeypatch.setattr(os, "posix_fallocate", real)
    assert [*tokens, *await client.rest(created.handle, len(tokens))] == plain
    await client.release(created.handle)


async def test_caches_that_cannot_grow_are_preempted_youngest_first(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [await client.create(PROMPT, max_new_tokens=300, ignore_eos=True) for _ in range(4)]
    real = Segment.reserve

    def full(segment: Segment, tokens: int) -> None:
        if tokens > 256 and len(open_segments()) > 1:
            raise OutOfMemory("no room")
        real(segment, tokens)

    monkeypatch.setattr(Segment, "reserve", full)
    gone = (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")
    for cache in reversed(caches[1:]):
        full_up = (grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_FULL")
        assert await client.refusal(caches[0].handle) == full_up
        assert await client.refusal(cache.handle) == gone
    assert len(await client.rest(caches[0].handle)) == 299
    await client.release(caches[0].handle)


async def test_requests_that_wait_for_memory_are_counted(model: Path, tmp_path: Path) -> None:
    registry = new_registry()

    def waiting() -> float:
        samples = [sample for family in registry.collect() for sample in family.samples]
        return sum(each.value for each in samples if each.name == "specdec_num_requests_waiting")

    options: dict[str, Any] = {"kv_bytes": 1 << 28, "max_sequences": 1, "metrics": registry}
    async with serving(model, tmp_path / "v.sock", **options) as client:
        first = await client.create(PROMPT)
        second = asyncio.create_task(client.create(PROMPT))
        await until(lambda: waiting() == 1)
        await client.release(first.handle)
        await client.release((await second).handle)
        assert waiting() == 0


async def test_nothing_leaks_under_churn(client: Client) -> None:
    """Generations that end, are cancelled at any point, or are released meanwhile."""
    fields: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}
    plain = await client.generate(PROMPT, None, **fields)

    async def churn(index: int) -> None:
        trees = drafters.mixed(drafters.random_tree, drafters.nothing)

        def draw(text: list[int], rng: random.Random) -> TokenTree:
            if index % 3 == 0 and len(text) >= len(PROMPT) + index:
                task.cancel()
            return trees(text, rng)

        task = asyncio.create_task(client.generate(PROMPT, draw, seed=index, **fields))
        if index % 3 == 0:
            await asyncio.gather(task, return_exceptions=True)
        else:
            assert await task == plain

    await asyncio.gather(*(churn(index) for index in range(24)))
    while client.service._gate.inside or len(client.service.store):
        for cache in client.service.store:  # of cancelled clients, before their leases end
            await client.release(cache.handle)
        await asyncio.sleep(0)
    await client.service.check_integrity()
