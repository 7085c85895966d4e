"""KV on a GPU, mapped by a drafter; the GPU is a piece of main memory here."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "kv"))

from fake_driver import FakeDriver

from paceline.drafter.kv import KvExchange, KvGone, KvNotShared, KvOptions, VerifierAccess
from paceline.drafter.kv.cuda import CudaKv
from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.cache import Cache
from paceline.verifier.engine.sequence import Generation, Sequence
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.pool import PagedKv, PagePool
from paceline.verifier.kv_exchange import KvExchangeServicer

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
COMMITTED = 300


class World:
    """A verifier's pool with one cache of 300 positions, and what it would say about it."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        size = 5 * 256 * LAYOUT.token_bytes
        self.pool = PagePool(
            LAYOUT, torch.device("cpu"), kv_bytes=size, max_sequences=2, max_context=1024,
            driver=self.driver,
        )  # fmt: skip
        self.pool.kv.copy_(torch.randn(self.pool.kv.shape))
        self.kv = PagedKv(self.pool, 768)
        self.cache = Cache(Sequence(Generation((1,)), self.kv), "me", 5)
        self.kv.reserve(COMMITTED)
        self.kv.publish(COMMITTED)

    def answer(self, layers: list[int] | None = None) -> kv_pb2.MapCacheResponse:
        numbers = layers or range(LAYOUT.layers)
        return kv_pb2.MapCacheResponse(
            segments=[self.kv.describe(layer, kind) for layer in numbers for kind in (0, 1)],
            dtype=kv_pb2.KV_DTYPE_BFLOAT16,
            generation=5,
        )

    def open(self, layers: tuple[int, ...], **change: Any) -> CudaKv:
        answer = change.pop("answer", None) or self.answer()
        return CudaKv(answer, self.cache.read_grant, layers, self.driver, 0)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.kv.close()
    made.pool.check_integrity()
    made.pool.close()
    assert not made.driver.memory
    assert not made.driver.opened


def test_a_drafter_reads_what_the_verifier_wrote(world: World) -> None:
    kv = world.open((0, -1))
    assert (kv.committed, kv.transport, kv.received) == (COMMITTED, "map", 0)
    for budget, positions in ((0, range(290)), (20, (*range(4), *range(274, 290)))):
        assert kv.refresh(290, budget) == 290
        for asked, layer in ((0, 0), (-1, 2)):
            ((keys, values),) = kv.parts(asked)
            expected = world.kv.gather(layer, torch.tensor(positions))
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])
    kv.check()
    kv.close()


def test_it_follows_the_text_without_a_call(world: World) -> None:
    kv = world.open((1,))
    world.kv.reserve(600)
    world.kv.publish(590)
    assert kv.refresh(1000, 0) == 590
    ((keys, _),) = kv.parts(1)
    assert torch.equal(keys, world.kv.gather(1, torch.arange(590))[0])
    kv.close()


def test_a_release_is_noticed_after_reading(world: World) -> None:
    kv = world.open((1,))
    kv.refresh(1000, 0)
    kv.parts(1)
    world.kv.close()
    with pytest.raises(KvGone, match="released"):
        kv.check()
    kv.close()
    with pytest.raises(KvGone, match="closed"):
        kv.refresh(1000, 0)


def test_a_page_table_that_leads_out_of_the_pool_is_not_followed(world: World) -> None:
    kv = world.open((1,))
    world.kv._table[1] = 5
    with pytest.raises(KvGone, match="out of its pool"):
        kv.refresh(1000, 0)
    kv.close()


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 1 << 40},
        {"offset": 1},
        {"head_stride": 1 << 62},
        {"position_stride": 8},
        {"heads": 0},
        {"page_size": 0},
        {"page_size": 512},
        {"page_size": 700},
        {"page_stride": 64},
        {"page_stride": 1 << 63},
        {"page_table_offset": 0},
        {"page_table_offset": 8192},
        {"page_table_offset": 4097},
        {"capacity": 0},
        {"capacity": 1 << 31},
        {"layer": 7},
    ],
    ids=str,
)
def test_lies_are_refused(world: World, lie: dict[str, int]) -> None:
    for both in (True, False):
        answer = world.answer()
        for segment in answer.segments if both else answer.segments[:1]:
            for name, value in lie.items():
                setattr(segment, name, value)
        with pytest.raises(KvNotShared):
            world.open((0, 1, 2), answer=answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [("handle", bytes(64)), ("device_uuid", b"?" * 16), ("byte_size", 1 << 33), ("byte_offset", 3)],
)
def test_memory_that_is_not_there_is_refused(world: World, field: str, value: Any) -> None:
    answer = world.answer()
    for segment in answer.segments:
        setattr(segment.cuda_ipc, field, value)
    with pytest.raises(KvNotShared):
        world.open((0,), answer=answer)


def test_another_grant_opens_nothing(world: World) -> None:
    with pytest.raises(KvNotShared, match="not, or no longer"):
        CudaKv(world.answer(), b"x" * 16, (0,), world.driver, 0)


class OneCache:
    """A store with the world's cache alone, for the servicer."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def find_granted(self, read_grant: bytes) -> Cache:
        assert read_grant == self._cache.read_grant
        return self._cache

    def lease_left(self, cache: Cache) -> float:
        return 30.0


@pytest.mark.parametrize(
    ("device", "linked", "kv", "transport"),
    [
        ("cuda:0", False, "auto", "map"),
        ("cuda:0", False, "map", "map"),
        ("cuda:1", True, "map", "map"),
        ("cuda:1", False, "auto", "follow"),
        ("cpu", False, "auto", "follow"),
        ("cuda:0", False, "follow", "follow"),
    ],
)
async def test_kv_on_a_gpu_is_mapped_where_the_drafter_can_and_followed_elsewhere(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    device: str, linked: bool, kv: str, transport: str,
) -> None:  # fmt: skip
    """By the verifier's own servicer, over gRPC."""
    if linked:
        world.driver.linked.add((1, 0))
    async with exchange(world, tmp_path, monkeypatch, device) as (drafter, address):
        found = await drafter.open(address, world.cache.read_grant, (0, -1), KvOptions(kv=kv), 64)
        assert found.transport == transport
        if transport == "map":
            found.refresh(COMMITTED, 64)
            ((keys, _),) = found.parts(0)
            assert keys.shape[1] == 64
        found.close()


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda:1", "no peer access"), ("cpu", "runs on cpu")]
)
async def test_a_drafter_that_insists_on_mapping_is_told_why_it_cannot(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, reason: str
) -> None:
    async with exchange(world, tmp_path, monkeypatch, device) as (drafter, address):
        with pytest.raises(KvNotShared, match=reason):
            await drafter.open(address, world.cache.read_grant, (0,), KvOptions(kv="map"), 64)


@asynccontextmanager
async def exchange(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> AsyncIterator[tuple[KvExchange, str]]:
    """A drafter's side on a device, and where the verifier's side listens."""
    monkeypatch.setattr("paceline.drafter.kv.cuda.cuda_driver", lambda: world.driver)
    store: Any = OneCache(world.cache)
    server = grpc.aio.server()
    kv_pb2_grpc.add_KvExchangeServiceServicer_to_server(KvExchangeServicer(store), server)
    address = f"unix:{folder}/verifier"
    server.add_insecure_port(address)
    await server.start()
    drafter = KvExchange(VerifierAccess(), device)
    try:
        yield drafter, address
    finally:
        await drafter.close()
        await server.stop(0)
