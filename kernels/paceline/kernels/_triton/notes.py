"""Rows whose scores the attention kernel records (Collect-2-Query, SpecAttn section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels._triton.plan import Tiling
from paceline.kernels.probes import MOST_NOTED, PlannedProbes, Probe
from paceline.kernels.trees import TreePlan

NONE = -2  # -1 is the node of rows that pad a tile

PLANNED = "planned notes"
"""Key of a plan's :class:`PlannedNotes`, for scores recorded at fixed addresses."""


class PlannedNotes(NamedTuple):
    """The table of :class:`NotedRows`, of a plan that is refilled before each run."""

    table: Tensor
    base: Tensor


@dataclass(frozen=True)
class NotedRows:
    """Probes in the form that the kernel reads.

    A tile holds all heads of a group, so sums over them need no atomic operation and have the same
    bits in every run.

    Attributes:
        count: Probes of a block at most, 0 to ``MOST_NOTED``.
        table: int64 ``[S, MOST_NOTED, 4]``: node (-2: none), origin of its scores, strides between
            heads and between layers.
        base: float32 tensor that origins are relative to.
        layer: Index of the layer among those recorded to one buffer.
        others: Probes that the kernel does not fill: those of weights, and any above ``MOST_NOTED``
            of a block.
    """

    count: int
    table: Tensor
    base: Tensor
    others: tuple[Probe, ...] = ()
    layer: int = 0

    @classmethod
    def of(cls, probes: Sequence[Probe], plan: TreePlan, tiling: Tiling) -> NotedRows:
        """Sort the probes of one call; with a window, their outputs are first filled with -inf."""
        if isinstance(probes, PlannedProbes):
            notes: PlannedNotes = plan.prepared[PLANNED]
            return cls(MOST_NOTED, notes.table, notes.base, layer=probes.layer)
        taken: dict[int, list[Probe]] = {}
        others: list[Probe] = []
        for probe in probes:
            mine = taken.setdefault(probe.segment, [])
            fits = len(mine) < MOST_NOTED and tiling.group <= tiling.rows and not probe.weights
            (mine if fits else others).append(probe)
        if not any(taken.values()):
            if "no probes" not in plan.prepared:
                none = torch.zeros(4 * MOST_NOTED, dtype=torch.int64, device=plan.device)
                plan.prepared["no probes"] = none, torch.zeros(4, device=plan.device)
            table, base = plan.prepared["no probes"]
            return cls(0, table, base, tuple(others))
        if tiling.window:
            for segment, mine in taken.items():
                for probe in mine:
                    probe.out[:, : plan.segments[segment].start] = -torch.inf
        first = next(mine[0].out for mine in taken.values() if mine)
        count = max(len(mine) for mine in taken.values())
        key = tuple((p.segment, p.node, p.weights, _address(p.out)) for p in probes)
        if key in plan.prepared:  # the next layer records to the same addresses
            return cls(count, plan.prepared[key], first, tuple(others))
        numbers = np.full((len(plan.segments), MOST_NOTED, 4), NONE, np.int64)
        for segment, mine in taken.items():
            for index, probe in enumerate(mine):
                origin = (probe.out.data_ptr() - first.data_ptr()) // 4
                numbers[segment, index] = (probe.node, origin, probe.out.stride(0), 0)
        plan.prepared[key] = torch.from_numpy(numbers).to(plan.device)
        return cls(count, plan.prepared[key], first, tuple(others))


def _address(out: Tensor) -> tuple[int, int]:
    return out.data_ptr(), out.stride(0)
