"""Plans with tables at fixed addresses, so that a captured forward pass can be replayed.

A CUDA graph replays kernels with the grids and addresses of its capture. Here these are sized for
the largest batch of a shape. Unused work items have no keys and end at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels._triton.notes import NONE, PLANNED, PlannedNotes
from paceline.kernels._triton.plan import (
    MASK_WORDS,
    STATIC,
    RowTables,
    Tables,
    Tiling,
    WorkTables,
    choose_tiling,
    row_arrays,
    work_arrays,
)
from paceline.kernels.probes import MOST_NOTED, NotedBlock
from paceline.kernels.trees import TreePlan, TreeSegment, plan_trees


class GraphPlan:
    """A plan for up to ``rows`` packed rows over paged caches, refilled before each run.

    Attributes:
        rows: Packed rows, padding included.
        plan: The plan for the decoder. It has no segments: kernels read its tables.
        tokens: Token of each row, int64 ``[rows]``; 0 in padding.
    """

    def __init__(
        self,
        rows: int,
        keys: Tensor,
        tilings: Sequence[Tiling],
        longest: int,
        *,
        notes: bool = False,
    ) -> None:
        """Allocate the tables.

        Args:
            rows: Packed rows.
            keys: Key pool ``[pages, Hkv, page_size, D]``, for its device.
            tilings: Tiling of each kind of layer; see :func:`tilings_for`.
            longest: Largest possible position.
            notes: Whether layers record scores.
        """
        self.rows = rows
        self._tilings = tilings
        shapes: list[tuple[int, ...]] = [
            (2, rows, 2),  # tokens and positions, as int64
            (rows, 3), (rows, 4), (rows, MASK_WORDS),
        ]  # fmt: skip
        for tiling in tilings:
            tiles = rows * -(-tiling.group // tiling.used)
            shapes += [(tiling.programs + tiles, 4), (tiles, 2), (rows,)]
        if notes:
            shapes.append((rows, MOST_NOTED, 4, 2))  # as int64
        sizes = [-(-int(np.prod(shape)) // 4) * 4 for shape in shapes]
        on_gpu = keys.device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._host, device=keys.device)
        self._sent = torch.cuda.Event() if on_gpu else None
        self._sections = [
            part.numpy()[: int(np.prod(shape))].reshape(shape)
            for part, shape in zip(self._host.split(sizes), shapes, strict=True)
        ]
        on_device = [
            part[: int(np.prod(shape))].view(shape)
            for part, shape in zip(self._device.split(sizes), shapes, strict=True)
        ]
        self.tokens, positions = on_device[0].view(torch.int64)[..., 0]
        work = {
            tiling: WorkTables(*on_device[4 + 3 * index : 7 + 3 * index])
            for index, tiling in enumerate(tilings)
        }
        static = StaticTables(RowTables(*on_device[1:4]), work)
        self.plan = TreePlan((), (0, rows), positions, longest, keys.device, {STATIC: static})
        self._notes: NDArray[np.int64] | None = None
        self._base = torch.zeros(4, device=keys.device)
        if notes:
            self._notes = self._sections.pop().view(np.int64)[..., 0]
            table = on_device[-1].view(torch.int64)[..., 0]
            self.plan.prepared[PLANNED] = PlannedNotes(table, self._base)
        self.fill([], [], [])

    def fill(
        self,
        tokens: Sequence[int],
        segments: Sequence[TreeSegment],
        table_rows: Sequence[int],
        noted: Sequence[NotedBlock] = (),
    ) -> None:
        """Write another batch, possibly empty, to the tables.

        Args:
            tokens: Packed tokens, at most ``rows``.
            segments: Their blocks.
            table_rows: Row of the page tables of each sequence.
            noted: Blocks whose scores are recorded.
        """
        if self._sent is not None:
            self._sent.synchronize()  # the last copy may still read the host tables
        both, rows, blocks, masks, *work = self._sections
        rows[:, 0] = -1
        for items in work[::3]:
            items[:] = 0
        if tokens:
            plan = plan_trees(segments)
            numbers = both.view(np.int64)[..., 0]
            numbers[0, : len(tokens)] = tokens
            numbers[0, len(tokens) :] = 0
            numbers[1, : len(tokens)] = plan.positions.numpy()
            found = row_arrays(plan, table_rows)
            for section, array in zip((rows, blocks, masks), found, strict=True):
                section[: len(array)] = array
            for index, tiling in enumerate(self._tilings):
                arrays = work_arrays(plan, tiling)
                for section, array in zip(work[3 * index : 3 * index + 3], arrays, strict=True):
                    section[: len(array)] = array
        if self._notes is not None:
            self._notes[..., 0] = NONE
            for each in noted:
                layers, nodes, heads, _ = each.out.stride()
                first = (each.out.data_ptr() - self._base.data_ptr()) // 4
                for index, node in enumerate(each.nodes):
                    self._notes[each.block, index] = (node, first + index * nodes, heads, layers)
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class StaticTables(Tables):
    """Tables at fixed addresses."""

    def __init__(self, rows: RowTables, work: dict[Tiling, WorkTables]) -> None:
        self.rows = rows
        self._work = work
        self._by_window = {tiling.window: tiling for tiling in work}

    def tiling(self, group: int, keys: Tensor, window: int | None) -> Tiling:
        """See :class:`Tables`."""
        return self._by_window[window or 0]


def tilings_for(
    widest: int, group: int, keys: Tensor, windows: Sequence[int | None]
) -> tuple[Tiling, ...]:
    """The tiling of each kind of layer.

    Args:
        widest: Nodes of the largest block.
        group: Query heads per kv head.
        keys: Key pool ``[pages, Hkv, page_size, D]``.
        windows: Sliding window of every layer.
    """
    kinds = dict.fromkeys(windows)
    return tuple(choose_tiling(widest * group, group, keys, window) for window in kinds)
