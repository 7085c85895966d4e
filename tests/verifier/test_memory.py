"""Segments, leases, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drafters
import grpc
import pytest
import torch
from verifier_support import Client, Round, failure, reason_of, serving, until

from paceline.v1 import verifier_pb2
from paceline.verifier.engine.sequence import Generation, Sequence
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import OutOfMemory, Segment, own_segments, sweep_orphans
from paceline.verifier.store import CacheNotFound, CacheStore, StoreFull

LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=8, dtype=torch.float32)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(LAYOUT, 1024)
    yield made
    made.close()


def test_memory_comes_when_reserved(segment: Segment) -> None:
    def pages() -> int:
        return segment.path.stat().st_blocks * 512

    assert segment.path.stat().st_size == LAYOUT.byte_size(1024) == segment.byte_size
    assert segment.path.stat().st_mode & 0o777 == 0o600
    assert pages() == 0
    segment.reserve(1)
    assert segment.reserved == 256
    assert pages() == 256 * LAYOUT.token_bytes
    segment.kv[..., :256, :] = 1.0
    assert pages() == 256 * LAYOUT.token_bytes, "writing took no memory beyond the reservation"
    segment.reserve(300)
    assert segment.reserved == 512
    segment.reserve(10_000)
    assert segment.reserved == segment.capacity == 1024


def test_growing_moves_nothing(segment: Segment) -> None:
    segment.reserve(256)
    keys, values = segment.layer(1)
    keys[:, :256] = 7.0
    values[:, :256] = 8.0
    before = segment.kv.data_ptr()
    segment.reserve(1024)
    assert segment.kv.data_ptr() == before
    assert segment.kv[1, 0, :, :256].eq(7).all()
    assert segment.kv[1, 1, :, :256].eq(8).all()
    assert segment.kv[0].eq(0).all()
    assert keys.shape == (3, 1024, 8)
    assert keys[0].is_contiguous()


def test_the_file_holds_what_the_tensor_shows(segment: Segment) -> None:
    """Others can map it by offset and strides alone."""
    segment.reserve(256)
    segment.kv[:, :, :, :256] = torch.randn(2, 2, 3, 256, 8)
    raw = torch.frombuffer(bytearray(segment.path.read_bytes()), dtype=torch.float32)
    assert torch.equal(raw.view(2, 2, 3, 1024, 8), segment.kv)


def test_moving_a_path(segment: Segment) -> None:
    segment.reserve(256)
    segment.kv[..., :256, :] = torch.arange(256.0)[:, None]
    segment.keep([12, 13, 20], 11)
    row = segment.kv[1, 1, 2, :256, 3].tolist()
    assert row == [*range(11), 12, 13, 20, *range(14, 256)]


def test_a_full_disk_is_an_error_and_no_signal(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment.reserve(256)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match="256 more tokens"):
        segment.reserve(257)
    assert segment.reserved == 256
    monkeypatch.undo()
    segment.reserve(257)
    assert segment.reserved == 512


def test_closing_frees_at_once(segment: Segment) -> None:
    view = segment.layer(0)[0]
    segment.close()
    segment.close()
    assert not segment.path.exists()
    assert segment.closed
    view.zero_()  # a view that was left keeps its own memory: no crash


CHILD = """
import time, torch
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment
segment = Segment(KvLayout(1, 1, 8, torch.float32), 256)
segment.reserve(256)
print(segment.name, flush=True)
time.sleep(1000)
"""


def test_segments_of_the_dead_are_swept(segment: Segment) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        path = segment.path.with_name(child.stdout.readline().strip())
        sweep_orphans()
        assert path.exists(), "its owner lives"
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert path.exists()
        assert sweep_orphans() >= 1
        assert not path.exists()
        assert segment.path.exists(), "our own stay"
    finally:
        child.kill()
        child.wait()


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def free(sequence: Sequence) -> None:
    sequence.segment.close()


def new_store(clock: Clock, **options: Any) -> CacheStore:
    settings: dict[str, Any] = {"kv_bytes": 1 << 24, "max_sequences": 4, "lease_seconds": 10.0}
    return CacheStore(LAYOUT, free, clock=clock, **(settings | options))


async def test_leases_run_out_all_of_them() -> None:
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


async def test_admission_counts_the_worst_case() -> None:
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
    for cache in caches:
        await store.release(cache)
        await store.release(cache)
    assert store.used_bytes == 0


async def test_a_cancelled_release_frees_all_the_same() -> None:
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
    await store.settled()
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
    store.used_bytes += 1
    with pytest.raises(AssertionError, match="bytes accounted"):
        store.check_integrity()
    store.used_bytes -= 1
    cache.sequence.segment.close()
    with pytest.raises(AssertionError, match="its segment is closed"):
        store.check_integrity()
    await store.release(cache)
    store.check_integrity()


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
            import time

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
