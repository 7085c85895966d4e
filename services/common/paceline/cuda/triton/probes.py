"""Rows whose scores or weights are recorded, in the form that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.cuda.triton.jit.attention import NONE
from paceline.kernels.attention import MAX_PROBES, Probe
from paceline.kernels.trees import TreePlan, send

NO_NODE = -2  # -1 is the node of rows that pad a tile


@dataclass(frozen=True)
class ProbeTable:
    """Probes in the form that the kernels read.

    A tile holds all heads of a group, so sums over them need no atomic operation and have the same
    bits in every run.
    """

    count: int  # probes of a block at most that attention records itself, 0 to `MAX_PROBES`
    # int64 `[S, MAX_PROBES, 4]`: node (-2: none), origin of its scores, strides between heads and
    # between layers.
    table: Tensor
    base: Tensor  # float32 tensor that origins are relative to
    # Blocks that a kernel of its own records, with weights or with more rows; int64 `[S, 4]`:
    # whether the block is one, strides between heads and between layers, whether it records
    # weights. None: of no block.
    wanted: Tensor | None = None
    noted: Tensor | None = None  # origins of their rows, int64 `[M]`; `NONE`: not recorded
    # Probes that no kernel fills: a second one of a row, and probes of groups larger than a tile.
    others: tuple[Probe, ...] = ()
    layer: int = 0  # index of the layer among those recorded to one buffer


@dataclass(frozen=True)
class ProbeArrays:
    """The arrays of a :class:`ProbeTable` on the host."""

    table: NDArray[np.int64]
    wanted: NDArray[np.int64]
    noted: NDArray[np.int64]

    def clear(self) -> None:
        """Record nothing."""
        self.table[..., 0] = NO_NODE
        self.wanted[:] = 0
        self.noted[:] = NONE.value

    def add(
        self, block: int, node: int, row: int, origin: int, strides: tuple[int, int], weights: bool
    ) -> bool:
        """Record a node of a block, which is a packed row; returns whether there is room."""
        taken = np.count_nonzero(self.table[block, :, 0] != NO_NODE)
        if not weights and taken < MAX_PROBES:
            self.table[block, taken] = (node, origin, *strides)
            return True
        kind = (1, *strides, weights)
        free = not self.wanted[block, 0] or tuple(self.wanted[block]) == kind
        if not free or self.noted[row] != NONE.value:
            return False
        self.wanted[block], self.noted[row] = kind, origin
        return True


def sort_probes(probes: Sequence[Probe], plan: TreePlan) -> tuple[ProbeTable, tuple[int, ...]]:
    """Return a table, relative to the output of the first probe, and the numbers of the probes that
    it has no room for."""
    blocks = len(plan.blocks)
    sizes = (blocks * MAX_PROBES * 4, blocks * 4, plan.rows)
    flat = np.empty(sum(sizes), np.int64)
    table, wanted, noted = np.split(flat, np.cumsum(sizes)[:2])
    arrays = ProbeArrays(table.reshape(-1, MAX_PROBES, 4), wanted.reshape(-1, 4), noted)
    arrays.clear()
    base, others = probes[0].out, []
    for index, probe in enumerate(probes):
        row = plan.offsets[probe.block] + probe.node
        origin = (probe.out.data_ptr() - base.data_ptr()) // 4
        strides = probe.out.stride(0), 0
        if not arrays.add(probe.block, probe.node, row, origin, strides, probe.weights):
            others.append(index)
    count = int((arrays.table[..., 0] != NO_NODE).sum(1).max())
    sent = send(torch.from_numpy(flat), plan.device).split(sizes)
    if not wanted.any():
        return ProbeTable(count, sent[0], base), tuple(others)
    return ProbeTable(count, sent[0], base, sent[1], sent[2]), tuple(others)
