"""The cache store: admission, capabilities, leases, and no leaks when clients disappear."""

import asyncio
import errno
import os
import random
from typing import Any

import drafters
import grpc
import pytest
from calls import details_of, failure, reason_of, until
from google.rpc import error_details_pb2
from verifier_support import LAYOUT, PROMPT, Client, Clock, Serve, paused_engine

from paceline.service.metrics import new_registry
from paceline.text import Text
from paceline.tree import TokenTree
from paceline.v1 import verifier_pb2
from paceline.verifier.engine.job import CachedSequence, Request
from paceline.verifier.engine.report import FinishReason
from paceline.verifier.kv.base import OutOfMemory, open_segments
from paceline.verifier.kv.segment import Segment, SegmentMemory
from paceline.verifier.store import CacheNotFound, CacheStore, StoreFull


def new_store(
    clock: Clock, gate: asyncio.Event | None = None, kv_bytes: int = 1 << 24, max_sequences: int = 4
) -> CacheStore:
    """A store of caches that are freed once the gate is set, if there is one."""

    async def free(sequence: CachedSequence) -> None:
        if gate is not None:
            await gate.wait()
        sequence.kv.close()

    memory = SegmentMemory(LAYOUT, kv_bytes)
    options: dict[str, Any] = {"max_sequences": max_sequences, "lease_seconds": 10.0}
    return CacheStore(memory, free, clock=clock, **options)


async def test_leases_expire() -> None:
    clock = Clock()
    store = new_store(clock)
    caches = [await store.admit(Request(Text((1,), limit=9)), "me") for _ in range(3)]
    clock.now = 6.0
    assert store.find(caches[1].handle, "me") is caches[1]
    clock.now = 10.0
    assert await store.sweep() == 2
    for gone in (caches[0], caches[2]):
        with pytest.raises(CacheNotFound):
            store.find(gone.handle, "me")
    store.check_integrity()
    assert store.find_granted(caches[1].read_grant) is caches[1]
    clock.now = 16.0
    with pytest.raises(CacheNotFound):
        store.find_granted(caches[1].read_grant)  # before the sweep
    assert await store.sweep() == 1
    assert (len(store), store.memory.used_bytes) == (0, 0)
    store.check_integrity()


async def test_a_lease_that_was_renewed_while_another_cache_is_freed() -> None:
    """Is looked at again: its cache stays."""
    clock, gate = Clock(), asyncio.Event()
    store = new_store(clock, gate)
    first, second, third = [await store.admit(Request(Text((1,), limit=9)), "me") for _ in range(3)]
    clock.now = 10.0
    sweeping = asyncio.create_task(store.sweep())
    await asyncio.sleep(0)
    store.renew(second)
    releasing = asyncio.create_task(store.release(third))
    await asyncio.sleep(0)
    gate.set()
    assert await sweeping == 1
    await releasing
    assert (first.released, second.released, store.expired) == (True, False, 1)
    await store.close()


async def test_admission_counts_texts_at_their_expected_length() -> None:
    generation = Request(Text((1,) * 10, limit=5000))
    memory = LAYOUT.capacity(5000) * LAYOUT.token_bytes
    store = new_store(Clock(), kv_bytes=memory, max_sequences=64)
    expected = 512 * LAYOUT.token_bytes  # 10 + 256 tokens, in steps of 256
    caches = [await store.admit(generation, "me") for _ in range(memory // expected)]
    assert len(caches) == 10
    waiting = [asyncio.create_task(store.admit(generation, "me")) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    caches[0].sequence.finish = FinishReason.STOP
    await store.release(caches[0])
    caches.append(await waiting[0])
    assert not waiting[1].done()
    waiting[1].cancel()
    with pytest.raises(StoreFull) as full:
        await store.admit(Request(Text((1,), limit=5400)), "me")
    assert full.value.forever
    for cache in caches:
        await store.release(cache)
        await store.release(cache)
    store.check_integrity()


async def test_released_generations_are_admitted_before_new_ones() -> None:
    store = new_store(Clock(), max_sequences=1)
    first = await store.admit(Request(Text((1,), limit=9)), "me")
    new = asyncio.create_task(store.admit(Request(Text((1,), limit=9)), "me"))
    again = asyncio.create_task(store.admit(Request(Text((1,), (2,), limit=9)), "me"))
    await asyncio.sleep(0)
    await store.release(first)
    second = await again
    assert not new.done()
    await store.release(second)
    await store.release(await new)


async def test_a_cancelled_release_frees_the_memory() -> None:
    gate = asyncio.Event()
    store = new_store(Clock(), gate)
    cache = await store.admit(Request(Text((1,), limit=9)), "me")
    releasing = asyncio.create_task(store.release(cache))
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    with pytest.raises(CacheNotFound):
        store.find(cache.handle, "me")
    assert len(store) == 1
    gate.set()
    await store.wait_released()
    assert (len(store), store.memory.used_bytes, open_segments()) == (0, 0, set())


async def test_every_capability_and_generation_differs() -> None:
    store = new_store(Clock())
    caches = [await store.admit(Request(Text((1,), limit=9)), "me") for _ in range(4)]
    secrets = {secret for cache in caches for secret in (cache.handle, cache.read_grant)}
    assert len(secrets) == 8
    assert {len(secret) for secret in secrets} == {16}
    assert len({cache.epoch for cache in caches}) == 4
    for cache in caches:
        await store.release(cache)


async def test_the_integrity_check_sees_damage(segment: Segment) -> None:
    store = new_store(Clock())
    with pytest.raises(AssertionError, match="segments and caches differ"):
        store.check_integrity()  # the fixture's segment belongs to no cache
    segment.close()
    store.check_integrity()
    cache = await store.admit(Request(Text((1,), limit=9)), "me")
    store.memory.used_bytes += 1
    with pytest.raises(AssertionError, match="bytes accounted"):
        store.check_integrity()
    store.memory.used_bytes -= 1
    cache.sequence.kv.close()
    with pytest.raises(AssertionError, match="its segment is closed"):
        store.check_integrity()
    await store.release(cache)
    store.check_integrity()


async def test_a_lease_lasts_through_a_long_prefill(serve: Serve) -> None:
    clock = Clock()
    async with serve(prefill_token_limit=256, clock=clock) as client:
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


async def test_requests_that_wait_for_memory_are_counted(serve: Serve) -> None:
    registry = new_registry()

    def waiting() -> float:
        samples = [sample for family in registry.collect() for sample in family.samples]
        return sum(each.value for each in samples if each.name == "specdec_num_requests_waiting")

    options: dict[str, Any] = {"kv_bytes": 1 << 28, "max_sequences": 1, "metrics": registry}
    async with serve(**options) as client:
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
