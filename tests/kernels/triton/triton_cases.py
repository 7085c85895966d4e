"""Caches to attend to, contiguous and in pages, and a backend that writes into poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels import (
    AttentionBackend,
    AttentionCall,
    PagedPlane,
    Probe,
    QueryBlock,
    plan_trees,
)
from paceline.kernels.caches import Plane


def draw_caches(
    blocks: Sequence[QueryBlock], heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries and filled caches; what was not written is NaN."""
    q_heads, kv_heads, dim = heads
    rows = sum(block.length for block in blocks)
    q = 2 * torch.randn(rows, q_heads, dim).to(dtype)
    keys, values = [], []
    for block in blocks:
        for planes in (keys, values):
            plane = torch.full((kv_heads, block.stop + 5, dim), torch.nan, dtype=dtype)
            plane[:, : block.stop] = torch.randn(kv_heads, block.stop, dim).to(dtype)
            planes.append(plane)
    return q, keys, values


def in_pages(
    keys: Sequence[Tensor], values: Sequence[Tensor], page_size: int
) -> tuple[list[PagedPlane], list[PagedPlane]]:
    """The same caches in shuffled pages of two pools, the other pages of which are NaN."""
    kv_heads, _, dim = keys[0].shape
    counts = [-(-plane.shape[1] // page_size) for plane in keys]
    pages = torch.randperm(sum(counts) + 3).int()
    tables = torch.zeros(len(keys) + 1, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row + 1, :count] = pages[sum(counts[:row]) :][:count]
    paged: tuple[list[PagedPlane], list[PagedPlane]] = ([], [])
    for planes, found in zip((keys, values), paged, strict=True):
        shape = (len(pages), kv_heads, page_size, dim)
        pool = torch.full(shape, torch.nan, dtype=planes[0].dtype)
        for row, plane in enumerate(planes, 1):
            found.append(PagedPlane(pool, tables, row, plane.shape[1]))
            found[-1].write(torch.arange(plane.shape[1]), plane)
    return paged


MILLION = 1 << 20
"""Positions, a multiple of all page sizes and tiles, where a chunk begins."""


def in_far_pages(
    keys: Sequence[Tensor], values: Sequence[Tensor], before: int, elements: int
) -> tuple[list[PagedPlane], list[PagedPlane]]:
    """The same cache behind ``before`` positions that are not there, in the last pages of a pool
    of more than ``elements``, little of which is touched."""
    (key,), (value,) = keys, values
    kv_heads, slots, dim = key.shape
    size = 256
    count = -(-slots // size)
    first = elements // (2 * kv_heads * size * dim) + 1
    pool = torch.empty(first + count, 2, kv_heads, size, dim, dtype=key.dtype)
    pool[first:] = torch.nan
    table = torch.full((1, before // size + count), -1, dtype=torch.int32)
    table[0, -count:] = torch.arange(first, first + count).flip(0)
    planes = [PagedPlane(pool[:, kind], table, 0, before + slots) for kind in (0, 1)]
    for plane, given in zip(planes, (key, value), strict=True):
        plane.write(torch.arange(before, before + slots), given)
    return planes[:1], planes[1:]


def run(
    blocks: Sequence[QueryBlock],
    q: Tensor,
    keys: Sequence[Plane],
    values: Sequence[Plane],
    window: int | None,
    probes: Sequence[Probe] = (),
    backend: AttentionBackend | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp by a backend; None: the Triton one."""
    from paceline.kernels.triton.backend import TritonBackend

    out = torch.full(q.shape, torch.nan)  # poisoned
    lse = torch.full(q.shape[:2], torch.nan)
    scale = q.shape[2] ** -0.5
    (backend or TritonBackend()).attend(
        AttentionCall(
            q, keys, values, plan_trees(blocks), scale, window, out, lse, probes, sinks=sinks
        )
    )
    return out, lse


def check(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found[0].double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found[1].double(), expected[1], atol=tolerance, rtol=tolerance)
