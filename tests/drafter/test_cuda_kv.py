"""KV and hidden states on a GPU, mapped by a drafter; the GPU is a piece of main memory here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from open_files import memory_files
from stub_driver import NO_FILES, NO_HANDLES, StubDevice, StubDriver

from paceline.cuda.memory import DriverError, close_unused
from paceline.device import CPU
from paceline.drafter.kv import KvGone, KvNotShared, KvOptions
from paceline.drafter.kv.cuda import CudaKv, CudaStates
from paceline.drafter.kv.exchange import KvExchange, VerifierAccess
from paceline.drafter.kv.mapped import CacheFile
from paceline.text import Text
from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.engine.job import CachedSequence, Request
from paceline.verifier.kv.base import KvLayout, TapLayout, Taps
from paceline.verifier.kv.pool import PagedKv, PagePool
from paceline.verifier.rpc.kv_exchange import KvExchangeServicer
from paceline.verifier.store import Cache

from .segments import change_layout, passed

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=16, dtype=torch.bfloat16, hidden=24)
COMMITTED = 300


class Pool:
    """A verifier's pool with one cache of 300 positions, and hidden states of two layers."""

    def __init__(self, driver: StubDriver) -> None:
        self.driver = driver
        size = 5 * 256 * LAYOUT.token_bytes
        self.pages = PagePool(
            LAYOUT, StubDevice(driver), kv_bytes=size, max_sequences=2, max_context=1024
        )
        self.pages.kv.copy_(torch.randn(self.pages.kv.shape))
        self.kv = PagedKv(self.pages, 768, TapLayout.of(Taps((0, 2), 16), LAYOUT, 768))
        self.cache = Cache(CachedSequence(Request(Text((1,))), self.kv, "me"), 5)
        self.kv.reserve(COMMITTED)
        self.states = {layer: torch.randn(600, LAYOUT.hidden) for layer in (0, 2)}
        assert self.kv.taps is not None
        self.kv.taps.record(0, self.states, slice(0, COMMITTED))
        self.kv.publish(COMMITTED)

    def open(self, *layers: int) -> CudaKv:
        return CudaKv(CacheFile(*passed(self.kv)), layers, StubDevice(self.driver))

    def open_states(self, *layers: int, window: int = 0) -> CudaStates:
        return CudaStates(CacheFile(*passed(self.kv)), layers, window, StubDevice(self.driver))


@pytest.fixture(params=["", NO_FILES], ids=["file", "ipc"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(StubDriver(request.param))
    assert len(made.kv.files) == 1 + (not request.param)
    yield made
    close_unused()
    made.kv.close()
    made.pages.check_integrity()
    made.pages.close()
    assert made.driver.live() == {}


def test_a_drafter_reads_what_the_verifier_wrote(pool: Pool) -> None:
    kv = pool.open(0, -1)
    assert (kv.committed, kv.transport, kv.received) == (COMMITTED, "map", 0)
    for below, budget, positions in (
        (290, 0, range(290)),
        (290, 20, (*range(4), *range(274, 290))),
        (1000, 0, range(590)),  # after more was committed, without a call
    ):
        if below > COMMITTED:
            pool.kv.reserve(600)
            pool.kv.publish(590)
        assert kv.refresh(below, budget) == positions[-1] + 1
        for index, layer in ((0, 0), (-1, 2)):
            ((keys, values),) = kv.parts(index)
            expected = pool.kv.gather(layer, torch.tensor(positions))
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])
    kv.check()
    kv.close()


def test_a_released_cache_is_detected_after_reading(pool: Pool) -> None:
    kv = pool.open(1)
    kv.refresh(1000, 0)
    kv.parts(1)
    pool.kv.close()
    with pytest.raises(KvGone, match="released"):
        kv.check()
    kv.close()
    with pytest.raises(KvGone, match="closed"):
        kv.refresh(1000, 0)


def test_a_drafter_reads_hidden_states_in_place(pool: Pool) -> None:
    states = pool.open_states(2, 0)
    assert (states.committed, states.transport, states.received) == (COMMITTED, "map", 0)
    expected = torch.cat([pool.states[2], pool.states[0]], dim=1)
    first, rows = states.read(3, 290)
    assert first == 3
    assert torch.equal(rows, expected[3:290])
    states.check()
    pool.kv.reserve(600)  # takes another page
    assert pool.kv.taps is not None
    pool.kv.taps.record(COMMITTED, pool.states, slice(COMMITTED, 600))
    pool.kv.publish(600)
    assert torch.equal(states.read(280, 600)[1], expected[280:600])
    assert states.read(600, 600)[1].shape == (0, 48)
    states.check()
    states.close()
    newest = pool.open_states(2, window=16)
    first, rows = newest.read(0, 600)
    assert first == 584
    assert torch.equal(rows, pool.states[2][584:600])
    newest.close()


def test_states_that_change_while_they_are_read_are_detected(pool: Pool) -> None:
    states = pool.open_states(0)
    states.read(0, 10)
    pool.kv.publish(768)  # 256 positions behind it may be written over the first ones
    with pytest.raises(KvGone, match="overwritten"):
        states.check()
    assert states.read(0, 300)[0] == 256
    states.check()
    states.read(290, 300)
    pool.kv.close()
    with pytest.raises(KvGone, match="released"):
        states.check()
    states.close()


def test_an_invalid_page_table_is_refused(pool: Pool) -> None:
    kv, states = pool.open(1), pool.open_states(0)
    pool.kv._table[1] = pool.kv._table[3] = 5
    kv.refresh(1000, 0)
    for read in (kv.parts, kv.pages):
        with pytest.raises(KvGone, match="out of its pool"):
            read(1)
    for find in (states.read, states.slice):
        with pytest.raises(KvGone, match="out of its pool"):
            find(0, 1)
    kv.close()
    states.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 2},
        {"heads": 0},
        {"heads": 1 << 31},
        {"capacity": 0},
        {"capacity": 1 << 31},
        {"dtype": 5},
        {"pages__page_size": 0},
        {"pages__page_size": 4096},
        {"pages__memory__handle": bytes(64)},
        {"pages__memory__device_uuid": b"?" * 16},
        {"pages__memory__byte_size": 1 << 33},
        {"pages__memory__byte_offset": 3},
        {"hidden_states__hidden_size": 0},
        {"hidden_states__hidden_size": 1 << 31},
        {"hidden_states__slots": 1 << 30},
        {"hidden_states__slots": 264},
        {"hidden_states__layers": [0, 1]},
        {"hidden_states__table_offset": 8},
        {"hidden_states__dtype": kv_pb2.KV_DTYPE_INT8},
    ],
)
def test_no_layout_leads_out_of_file_or_pool(pool: Pool, fields: dict[str, Any]) -> None:
    change_layout(pool.kv, **fields)
    before = memory_files()
    with pytest.raises(KvNotShared):  # noqa: PT012 - each field is of one of both
        pool.open(0, 1, 2).close()
        pool.open_states(0, 2, window=16)
    close_unused()
    assert memory_files() == before


@pytest.mark.parametrize(
    ("device", "linked", "kv", "transport"),
    [
        ("cuda:0", False, "auto", "map"),
        ("cuda:0", False, "map", "map"),
        ("cuda:1", True, "map", "map"),
        ("cuda:1", False, "auto", "follow"),
        ("cpu", False, "auto", "follow"),
        ("cuda:0", False, "follow", "follow"),
        ("cuda:1", False, "map", "no peer access"),
        ("cpu", False, "map", "runs on cpu"),
    ],
)
async def test_kv_and_states_on_a_gpu_are_mapped_or_followed(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    device: str, linked: bool, kv: str, transport: str,
) -> None:  # fmt: skip
    """By the verifier's own servicer, over gRPC; or refused with the reason."""
    if linked:
        pool.driver.link(1, 0)
    async with exchange(pool, tmp_path, monkeypatch, device) as (drafter, address):
        for opening in (
            drafter.open(address, pool.cache.read_grant, (0, -1), KvOptions(kv=kv), 64),
            drafter.open_states(address, pool.cache.read_grant, (2, 0), 16, kv),
        ):
            if transport not in ("map", "follow"):
                with pytest.raises(KvNotShared, match=transport):
                    await opening
                continue
            reader = await opening
            assert reader.transport == transport
            reader.close()


@asynccontextmanager
async def exchange(
    pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> AsyncIterator[tuple[KvExchange, str]]:
    """A drafter's side on the GPU or on a CPU, and where the verifier's side listens."""
    granted = {pool.cache.read_grant: pool.cache}  # a store with the pool's cache alone
    store: Any = SimpleNamespace(find_granted=granted.__getitem__)
    server = grpc.aio.server()
    kv_pb2_grpc.add_KvExchangeServiceServicer_to_server(KvExchangeServicer(store), server)
    address = f"unix:{folder}/verifier"
    server.add_insecure_port(address)
    await server.start()
    gpu = None if device == "cpu" else StubDevice(pool.driver, int(device[-1]))
    drafter = KvExchange(VerifierAccess(), gpu or CPU)
    drafter.sockets[address] = "of the pool"
    monkeypatch.setattr("paceline.drafter.kv.exchange.request_files", lambda *_: passed(pool.kv))
    try:
        yield drafter, address
    finally:
        drafter.drop(address)
        assert "opened" not in pool.driver.live()
        await drafter.close()
        await server.stop(0)


@pytest.mark.parametrize("kv", ["auto", "map"])
async def test_a_pool_that_cannot_be_exported_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    """As on WSL2: the verifier starts, and says that nobody can map its KV."""

    def refuse(driver: StubDriver, device: int, byte_size: int) -> Any:
        raise DriverError("operation not supported")

    monkeypatch.setattr(StubDriver, "create", refuse)
    unexported = Pool(StubDriver(NO_HANDLES))
    async with exchange(unexported, tmp_path, monkeypatch, "cuda:0") as (drafter, address):
        opening = drafter.open(address, unexported.cache.read_grant, (0, -1), KvOptions(kv=kv), 64)
        if kv == "map":
            with pytest.raises(KvNotShared, match="other processes cannot map"):
                await opening
        else:
            reader = await opening
            assert reader.transport == "follow"
            reader.close()
    unexported.kv.close()
    unexported.pages.close()
