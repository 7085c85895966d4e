"""Caches to attend to, contiguous and in pages, and a backend that writes into poisoned memory."""

from collections.abc import Sequence
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.bench.reference import write
from paceline.cuda.triton.kernels import TritonKernels
from paceline.kernels import AttentionCall, DeviceKernels, PagedPlane, Probe, QueryBlock, plan_trees
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
            write(found[-1], 0, plane)
    return paged


MILLION = 1 << 20  # positions, a multiple of all page sizes and tiles, where a chunk begins


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
        write(plane, before, given)
    return planes[:1], planes[1:]


def run(
    blocks: Sequence[QueryBlock],
    q: Tensor,
    keys: Sequence[Plane],
    values: Sequence[Plane],
    window: int | None,
    probes: Sequence[Probe] = (),
    backend: DeviceKernels | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp by a backend; None: the Triton one."""

    out = torch.full(q.shape, torch.nan)  # poisoned
    lse = torch.full(q.shape[:2], torch.nan)
    scale = q.shape[2] ** -0.5
    (backend or TritonKernels()).attend(
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


_WAITING = {
    f"aten::{name}"
    for name in ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select")
}


class Waits(TorchDispatchMode):
    """Refuses what a capture on a GPU refuses: to read the device's numbers on the host."""

    def __enter__(self) -> Self:
        def tolist(_: Tensor) -> None:  # which dispatches nothing on a CPU
            raise AssertionError("aten::tolist waits")

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Tensor, "tolist", tolist)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masks = args[1] if name.startswith("aten::index") and isinstance(args[1], list) else []
        masked = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in masks)
        if name in _WAITING or masked:
            raise AssertionError(f"{name} waits")
        return func(*args, **(kwargs or {}))
