"""KV in pages of one pool, on the CPU: the same tokens as in shared memory, and no leaks."""

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_support import check_followed, mapping
from verifier_support import LAYOUT, MEMORY, Clock, Serve, text

from paceline.bench.reference import write
from paceline.cuda import CudaDevice
from paceline.device import CPU
from paceline.drafter.kv import KvNotShared
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD
from paceline.tree import TokenTree
from paceline.verifier.engine.acceptance import walk
from paceline.verifier.kv.base import OutOfMemory, TapLayout, Taps
from paceline.verifier.kv.pool import PAGE_TOKENS, PagedKv, PagePool
from paceline.verifier.kv.segment import Segment, SegmentMemory


def make_pool(pages: int, sequences: int = 2, hidden: int = 0) -> PagePool:
    layout, size = replace(LAYOUT, hidden=hidden), pages * PAGE_TOKENS * LAYOUT.token_bytes
    return PagePool(layout, CPU, kv_bytes=size, max_sequences=sequences, max_context=1024)


@pytest.mark.parametrize("policy", ["streaming", "chunk_topk", "verified_pages"])
async def test_followed_is_what_was_written(serve: Serve, policy: str) -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 24, "paged_kv": True}
    async with serve("Llama", **options) as client:
        created = await client.create(text(1, 300), max_new_tokens=5, ignore_eos=True)
        with pytest.raises(KvNotShared, match="pages that other processes cannot map"):
            await mapping(client, created, 0)
        await check_followed(client, created, 280, policy)


def test_the_kv_of_accepted_nodes_is_kept_without_knowing_them() -> None:
    """As the walk with the same tokens accepts them; over the border of a page, of two texts."""
    rng = random.Random(0)
    pool = make_pool(pages=4)
    pool.kv.copy_(torch.randn(pool.kv.shape))
    caches = [PagedKv(pool, 512), PagedKv(pool, 512)]
    moved = 0
    for cache in caches:
        cache.reserve(512)
    for _ in range(60):
        blocks, chosen = [], []
        for cache in caches:
            tree = TokenTree(
                tuple(rng.randrange(3) for _ in range(12)),
                tuple(rng.randrange(-1, min(node, 5)) for node in range(12)),
            )
            blocks.append((cache, 250, tree, len(chosen)))
            chosen += [rng.randrange(3) for _ in range(13)]
        before = [cache.gather(1, torch.arange(512))[0] for cache in caches]
        pool.keep_accepted(blocks, torch.tensor(chosen))
        for (cache, anchor, tree, first), old in zip(blocks, before, strict=True):
            tokens = chosen[first : first + 13]
            accepted = walk(tree, lambda node, own=tokens: own[node + 1], (), 99).accepted
            rows = [*range(anchor + 1), *(anchor + 1 + node for node in accepted)]
            found = cache.gather(1, torch.arange(512))[0]
            assert torch.equal(found[:, : len(rows)], old[:, rows])
            assert torch.equal(found[:, anchor + 13 :], old[:, anchor + 13 :])
            moved += accepted != list(range(len(accepted)))
    assert moved > 50
    for cache in caches:
        cache.close()
    pool.check_integrity()


def test_pages_are_taken_as_needed_and_freed() -> None:
    pool = make_pool(pages=3)
    first = PagedKv(pool, 1024)
    assert pool.free_pages == 3
    first.reserve(257)
    assert (first.reserved, pool.free_pages) == (512, 1)
    second = PagedKv(pool, 512)
    with pytest.raises(OutOfMemory, match="1 pages of KV left, 2 are needed"):
        second.reserve(512)
    assert (second.reserved, pool.free_pages) == (0, 1)
    with pytest.raises(OutOfMemory, match="page table"):
        PagedKv(pool, 256)
    first.close()
    second.reserve(512)
    with pytest.raises(AssertionError, match="1 of 3 pages and 1 of 2 page tables"):
        pool.check_integrity()
    second.close()
    second.close()
    pool.check_integrity()


def test_writing_moving_and_copying_are_as_in_shared_memory() -> None:
    pool = make_pool(pages=8, sequences=3)
    other = PagedKv(pool, 256)
    other.reserve(256)
    paged, plain = PagedKv(pool, 768), Segment(MEMORY, 768)
    everywhere = torch.arange(512)
    for kv in (paged, plain):
        torch.manual_seed(0)
        kv.reserve(512)
        for layer in range(LAYOUT.layers):
            for plane in kv.layer(layer):
                rows = torch.randn(LAYOUT.kv_heads, 512, LAYOUT.head_dim)
                write(plane, 0, rows)
        kv.compact([255, 258, 300], 254)
    copy = PagedKv(pool, 512)
    copy.copy_prefix(paged, 300, 512)
    for layer in range(LAYOUT.layers):
        for ours, theirs in zip(
            paged.gather(layer, everywhere), plain.gather(layer, everywhere), strict=True
        ):
            assert torch.equal(ours, theirs)
        start = torch.arange(300)
        for ours, theirs in zip(copy.gather(layer, start), plain.gather(layer, start), strict=True):
            assert torch.equal(ours, theirs)
    assert not other.gather(0, torch.arange(256))[0].any(), "another's pages were written"
    for kv in (other, paged, copy, plain):
        kv.close()
    pool.check_integrity()


def test_whole_pages_are_shared_and_freed_with_their_last_text() -> None:
    pool = make_pool(pages=8, sequences=3)
    first, second = PagedKv(pool, 1024), PagedKv(pool, 1024)
    first.reserve(600)
    pool.kv[first._pages[2]].fill_(3.0)
    second.copy_prefix(first, 530, 600)
    assert pool.free_pages == 4, "two pages are shared, the third is copied"
    assert second._pages[:2] == first._pages[:2]
    assert second._pages[2] != first._pages[2]
    assert (pool.kv[second._pages[2]] == 3.0).all()
    first.close()
    assert pool.free_pages == 5
    second.reserve(1024)
    second.close()
    pool.check_integrity()


def test_the_file_has_the_page_tables() -> None:
    pool = make_pool(pages=4, hidden=5)
    kv = PagedKv(pool, 768, TapLayout.of(Taps((0,)), pool.layout, 768))
    kv.reserve(512)
    raw = os.pread(kv.file, kv.file_bytes, 0)
    assert kv.taps is not None
    for offset, pages in (
        (HEADER_BYTES, pool.tables[1, :2].tolist()),
        (kv.header.layout.hidden_states.table_offset, kv.taps.pages),
    ):
        table = torch.frombuffer(bytearray(raw[offset:]), dtype=torch.int32, count=len(pages))
        assert table.tolist() == pages
    assert pool.free_pages == 1
    kv.close()


def test_hidden_states_are_kept_in_pages() -> None:
    """Written, moved and copied as in a segment; a ring of several pages."""
    pool = make_pool(pages=12, hidden=96)
    taps = TapLayout.of(Taps((0, 3), 100), pool.layout, 1024)
    assert (taps.slots, pool.bytes_of(1024, taps)) == (768, 10 * pool.page_bytes)
    states = {layer: torch.randn(1100, 96) for layer in (0, 3)}
    paged, plain = (
        PagedKv(pool, 1024, taps),
        Segment(SegmentMemory(pool.layout, 1 << 30), 1024, taps),
    )
    for kv in (paged, plain):
        assert kv.taps is not None
        kv.reserve(1000)
        kv.taps.record(0, states, slice(0, 900))
        kv.taps.record(900, states, [*range(900, 1000)])
    assert paged.taps is not None
    assert plain.taps is not None
    assert paged.reserved_bytes == pool.used_bytes == 10 * pool.page_bytes
    found = paged.taps.copy((3, 0), 232, 1000)
    assert all(map(torch.equal, found, plain.taps.copy((3, 0), 232, 1000)))
    assert torch.equal(found[0], states[3][232:1000])
    assert paged.taps.first_kept(1000) == 1000 + TAP_AHEAD - 768
    paged.taps.move([990, 995], 989)
    assert torch.equal(paged.taps.copy((0,), 989, 991)[0], states[0][[990, 995]])
    paged.close()
    pool.check_integrity()
    older, fork = (PagedKv(pool, 512, replace(taps, slots=512)) for _ in range(2))
    older.reserve(512)
    assert older.taps is not None
    older.taps.record(0, states, slice(0, 512))
    fork.copy_prefix(older, 256, 256)  # whole pages of KV are shared, not those of states
    assert fork.taps is not None
    rows = fork.taps.copy((0, 3), 156, 256)
    assert torch.equal(rows[1], states[3][156:256])
    older.close()
    fork.close()
    plain.close()
    pool.check_integrity()


GIB = 1 << 30


@pytest.mark.parametrize("until", [0.0, 3.0, math.inf])
def test_memory_that_an_earlier_verifier_held_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, until: float
) -> None:
    """A drafter maps it until its connection has ended; a small pool is not taken silently. Of a
    GPU of 80 GiB, of which this process holds 16."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    free = {True: (64 * GIB, 80 * GIB), False: (17 * GIB, 80 * GIB)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free[clock.now >= until])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    found = CudaDevice("cuda").kv_bytes(0.8, 0, clock=clock, sleep=sleep)
    if math.isfinite(until):
        assert (found, clock.now, caplog.text) == (48 * GIB, until, "")
    else:
        assert found == int(0.9 * 17 * GIB)
        assert "other processes hold 50.5 of its 85.9 GB" in caplog.text
