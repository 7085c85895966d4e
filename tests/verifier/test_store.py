"""The cache store: admission, capabilities, leases, and integrity."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verifier_support import LAYOUT

from paceline.verifier.engine.sequence import Generation, Sequence
from paceline.verifier.kv.segment import Segment, own_segments
from paceline.verifier.store import CacheNotFound, CacheStore, StoreFull


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def free(sequence: Sequence) -> None:
    sequence.segment.close()


def new_store(clock: Clock, **options: Any) -> CacheStore:
    settings: dict[str, Any] = {"kv_bytes": 1 << 24, "max_sequences": 4, "lease_seconds": 10.0}
    return CacheStore(LAYOUT, free, clock=clock, **(settings | options))


async def test_leases_expire() -> None:
    clock = Clock()
    store = new_store(clock)
    caches = [store.admit(Generation((1,), length_limit=9), "me") for _ in range(3)]
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
    assert (len(store), store.used_bytes) == (0, 0)
    store.check_integrity()


async def test_admission_counts_caches_at_their_largest() -> None:
    generation = Generation((1,) * 10, length_limit=300)
    need = LAYOUT.byte_size(512 + 256)
    store = new_store(Clock(), kv_bytes=2 * need)
    caches = [store.admit(generation, "me") for _ in range(2)]
    assert store.used_bytes == 2 * need
    with pytest.raises(StoreFull) as full:
        store.admit(generation, "me")
    assert not full.value.forever
    with pytest.raises(StoreFull) as full:
        store.admit(Generation((1,), length_limit=5000), "me")
    assert full.value.forever
    with pytest.raises(StoreFull):
        new_store(Clock(), max_sequences=0).admit(Generation((1,), length_limit=9), "me")
    for cache in caches:
        await store.release(cache)
        await store.release(cache)
    assert store.used_bytes == 0


async def test_a_cancelled_release_frees_the_memory() -> None:
    slow = asyncio.Event()

    async def later(sequence: Sequence) -> None:
        await slow.wait()
        sequence.segment.close()

    store = CacheStore(LAYOUT, later, kv_bytes=1 << 24, max_sequences=4, lease_seconds=9.0)
    cache = store.admit(Generation((1,), length_limit=9), "me")
    releasing = asyncio.create_task(store.release(cache))
    await asyncio.sleep(0)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    with pytest.raises(CacheNotFound):
        store.find(cache.handle, "me")
    assert len(store) == 1
    slow.set()
    await store.wait_released()
    assert (len(store), store.used_bytes, own_segments()) == (0, 0, set())


async def test_every_capability_and_generation_differs() -> None:
    store = new_store(Clock())
    caches = [store.admit(Generation((1,), length_limit=9), "me") for _ in range(4)]
    secrets = {secret for cache in caches for secret in (cache.handle, cache.read_grant)}
    assert len(secrets) == 8
    assert {len(secret) for secret in secrets} == {16}
    assert len({cache.generation for cache in caches}) == 4
    for cache in caches:
        await store.release(cache)


async def test_the_integrity_check_sees_damage(segment: Segment) -> None:
    store = new_store(Clock())
    with pytest.raises(AssertionError, match="segments and caches differ"):
        store.check_integrity()  # the fixture's segment belongs to no cache
    segment.close()
    store.check_integrity()
    cache = store.admit(Generation((1,), length_limit=9), "me")
    cache.sequence.committed = 1
    with pytest.raises(AssertionError, match="committed beyond what is reserved"):
        store.check_integrity()
    cache.sequence.committed = 0
    cache.sequence.tokens.append(1)
    with pytest.raises(AssertionError, match=r"text and history differ; .*anchor"):
        store.check_integrity()
    cache.sequence.tokens.pop()
    cache.sequence.segment.publish(3)
    with pytest.raises(AssertionError, match="its header differs"):
        store.check_integrity()
    cache.sequence.segment.publish(0)
    store.used_bytes += 1
    with pytest.raises(AssertionError, match="bytes accounted"):
        store.check_integrity()
    store.used_bytes -= 1
    cache.sequence.segment.close()
    with pytest.raises(AssertionError, match="its segment is closed"):
        store.check_integrity()
    await store.release(cache)
    store.check_integrity()
