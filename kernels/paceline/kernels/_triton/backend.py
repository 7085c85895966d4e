"""Tree attention on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from paceline.kernels._triton.caches import Caches
from paceline.kernels._triton.jit.attention import LOG2E, attend_items, merge_items
from paceline.kernels._triton.notes import NotedRows
from paceline.kernels._triton.plan import MASK_WORDS, RowTables, Tables, Tiling, WorkTables
from paceline.kernels.paged import Plane
from paceline.kernels.probes import Probe, note_scores
from paceline.kernels.trees import TreePlan

MERGE_CHUNKS = 16
"""Chunks of a row that are merged at a time."""


class TritonBackend:
    """Split-KV attention over contiguous or paged caches, in two kernels.

    Keys and values are of one type, float16, bfloat16 or float32; queries are rounded to it. The
    same call gives the same bits, but a row's bits depend on the batch: chunks are sized to fill
    the device.
    """

    name = "triton"
    pages = True

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Plane],
        values: Sequence[Plane],
        plan: TreePlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """See :func:`paceline.kernels.tree_attention`."""
        caches = Caches.of(keys, values, plan)
        tables = Tables.of(plan, caches.sequences)
        tiling = tables.tiling(q.shape[1] // caches.kv_heads, caches.keys, window)
        noted = NotedRows.of(probes, plan, tiling)
        target = out if out.is_contiguous() else torch.empty_like(out)
        attend(q.contiguous(), caches, tables.rows, tables.work(tiling), tiling, noted, scale,
               target, lse)  # fmt: skip
        if target is not out:
            out.copy_(target)
        if noted.others:
            note_scores(q, keys, plan, noted.others, scale=scale, window=window, lse=lse)


def attend(
    q: Tensor,
    caches: Caches,
    rows: RowTables,
    work: WorkTables,
    tiling: Tiling,
    noted: NotedRows,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run both kernels. All tensors but the caches are dense.

    Args:
        q: ``[M, Hq, D]``.
        caches: Keys and values.
        rows: Packed rows, as many as ``q`` has or fewer.
        work: Work items.
        tiling: Their sizes.
        noted: Rows whose scores are recorded.
        scale: Factor on the scores.
        out: ``[M, Hq, D]``.
        lse: float32 ``[M, Hq]`` or None.
    """
    kv_heads, dim, items = caches.kv_heads, caches.dim, work.items.shape[0]
    shape, options = attend_shape(tiling, dim, caches.page_size, noted.count)
    part = q.new_empty((items, kv_heads, tiling.rows, dim), dtype=torch.float32)
    part_lse = q.new_empty((items, kv_heads, tiling.rows), dtype=torch.float32)
    attend_items[(items, kv_heads)](
        q, caches.keys, caches.values, part, part_lse, work.items, rows.blocks, rows.rows,
        rows.masks, caches.tables, caches.origins, noted.table, noted.base, noted.layer,
        scale * LOG2E, *caches.strides, caches.tables.stride(0),
        **shape, ALIGN=caches.align, **options,
    )  # fmt: skip
    merge_items[(rows.rows.shape[0], q.shape[1])](
        part, part_lse, out, part_lse if lse is None else lse, rows.rows, work.tiles, work.bases,
        **{name: shape[name] for name in ("GROUP", "DIM", "WIDE", "BLOCK_M", "USED")},
        CHUNKS=MERGE_CHUNKS, HAS_LSE=lse is not None, num_warps=2,
    )  # fmt: skip


def attend_shape(
    tiling: Tiling, dim: int, page_size: int, probes: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and launch options of the first kernel.

    Args:
        tiling: Sizes of tiles.
        dim: Elements a head.
        page_size: Slots a page; 0: contiguous caches.
        probes: Rows of a block whose scores are recorded.
    """
    wide = max(16, triton.next_power_of_2(dim))
    shape = {
        "GROUP": tiling.group, "DIM": dim, "WIDE": wide, "BLOCK_M": tiling.rows,
        "USED": tiling.used, "BLOCK_N": tiling.keys, "PAGE": page_size, "WINDOW": tiling.window,
        "WORDS": MASK_WORDS, "PROBES": probes,
        # Loads of page numbers need two stages. With recorded scores, one stage less leaves shared
        # memory for two programs on a multiprocessor.
        "STAGES": (5 - bool(probes)) if page_size else 3,
    }  # fmt: skip
    return shape, {"num_warps": 8 if tiling.rows * wide > 64 * 128 else 4}
