"""The cache store: admission, capabilities, leases, and integrity."""

import asyncio
from typing import Any

import pytest
from verifier_support import LAYOUT, Clock

from paceline.text import Text
from paceline.verifier.engine.drafted import FinishReason
from paceline.verifier.engine.job import CachedSequence, Request
from paceline.verifier.kv.base import open_segments
from paceline.verifier.kv.segment import Segment, SegmentMemory
from paceline.verifier.store import CacheNotFound, CacheStore, StoreFull


async def free(sequence: CachedSequence) -> None:
    sequence.kv.close()


def new_store(clock: Clock, **options: Any) -> CacheStore:
    memory = SegmentMemory(LAYOUT, options.pop("kv_bytes", 1 << 24))
    settings: dict[str, Any] = {"max_sequences": 4, "lease_seconds": 10.0}
    return CacheStore(memory, free, clock=clock, **(settings | options))


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
    clock.now = 16.0
    assert await store.sweep() == 1
    assert (len(store), store.memory.used_bytes) == (0, 0)
    store.check_integrity()


async def test_a_lease_that_was_renewed_while_another_cache_is_freed() -> None:
    """Is looked at again: its cache stays."""
    clock = Clock()
    gate = asyncio.Event()

    async def slow(sequence: CachedSequence) -> None:
        await gate.wait()
        sequence.kv.close()

    memory = SegmentMemory(LAYOUT, 1 << 24)
    store = CacheStore(memory, slow, max_sequences=4, lease_seconds=10.0, clock=clock)
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
    slow = asyncio.Event()

    async def later(sequence: CachedSequence) -> None:
        await slow.wait()
        sequence.kv.close()

    memory = SegmentMemory(LAYOUT, 1 << 24)
    store = CacheStore(memory, later, max_sequences=4, lease_seconds=9.0)
    cache = await store.admit(Request(Text((1,), limit=9)), "me")
    releasing = asyncio.create_task(store.release(cache))
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    with pytest.raises(CacheNotFound):
        store.find(cache.handle, "me")
    assert len(store) == 1
    slow.set()
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
