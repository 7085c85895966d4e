"""A plan in the form that kernels read: small integer tables on the device.

Everything that depends on lengths, trees and their split into work items is computed on the host
and copied at once, so that a CUDA graph has only tables of fixed size at fixed addresses. Padding
rows belong to block -1; padding work items are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.trees import MAX_TREE_NODES, TreePlan

MASK_WORDS = MAX_TREE_NODES // 32
MIN_CHUNK = 256
"""Least keys of a work item; fewer do not repay the launch of a program."""

STATIC = "static tables"
"""Key of a plan's tables at fixed addresses (:mod:`paceline.kernels.graphs`)."""

MOST_ROWS = 128
"""Most rows of a tile: with their outputs they fill the registers."""

PROGRAMS_PER_SM = 2
INTERPRETED_PROGRAMS = 8

_Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of an attention call, which its kernel is compiled for.

    Attributes:
        group: Query heads per kv head. Rows of a tile go node by node, its group side by side.
        rows: Rows of a tile, a power of two.
        keys: Keys of a tile, a power of two; chunks begin at multiples of it.
        window: Sliding window in tokens; 0: none.
        programs: Number of work items that fills the device.
        prefix: Whether whole tiles of the committed prefix are part of the work.
    """

    group: int
    rows: int
    keys: int
    window: int
    programs: int
    prefix: bool = True

    @property
    def used(self) -> int:
        """Rows of a tile that are used: whole groups, where one fits."""
        return self.rows // self.group * self.group or self.rows

    def tiles(self, nodes: int) -> int:
        """Number of row tiles of a block of ``nodes`` nodes."""
        return -(-nodes * self.group // self.used)


@dataclass(frozen=True)
class RowTables:
    """Tables of packed rows and blocks.

    Attributes:
        rows: int32 ``[M, 3]``: block, node, depth.
        blocks: int32 ``[S, 4]``: first packed row, start, length, row of the page tables (or
            number of the sequence).
        masks: int32 ``[M, MASK_WORDS]``: bit n of a row is set if it attends to node n.
    """

    rows: Tensor
    blocks: Tensor
    masks: Tensor


@dataclass(frozen=True)
class WorkTables:
    """Tables of work items: row tiles and ranges of keys.

    Attributes:
        items: int32 ``[W, 4]``: block, first row inside the block (nodes times group), first key,
            end of keys.
        tiles: int32 ``[T, 2]``: first item and number of items of each row tile.
        bases: int32 ``[S]``: first tile of each block.
    """

    items: Tensor
    tiles: Tensor
    bases: Tensor


def row_arrays(plan: TreePlan, sequences: Sequence[int]) -> tuple[_Ints, _Ints, _Ints]:
    """The arrays of :class:`RowTables`.

    Args:
        plan: The packed blocks.
        sequences: Number of each sequence in the tables of blocks.
    """
    rows = np.empty((plan.rows, 3), np.int32)
    blocks = np.empty((len(plan.segments), 4), np.int32)
    masks = np.zeros((plan.rows, MASK_WORDS * 4), np.uint8)
    for index, (segment, first) in enumerate(zip(plan.segments, plan.offsets, strict=False)):
        mine = slice(first, first + segment.length)
        rows[mine, 0] = index
        rows[mine, 1] = np.arange(segment.length)
        rows[mine, 2] = segment.depths
        blocks[index] = (first, segment.start, segment.length, sequences[segment.sequence])
        bits = np.packbits(segment.ancestors(), axis=1, bitorder="little")
        masks[mine, : bits.shape[1]] = bits
    return rows, blocks, masks.view(np.int32)


def work_arrays(plan: TreePlan, tiling: Tiling) -> tuple[_Ints, _Ints, _Ints]:
    """The arrays of :class:`WorkTables`: equal chunks of keys over all row tiles of all blocks."""
    firsts = [_first_key(segment.start, tiling) for segment in plan.segments]
    counts = [tiling.tiles(segment.length) for segment in plan.segments]
    total = sum(
        (segment.stop - first) * tiles
        for segment, first, tiles in zip(plan.segments, firsts, counts, strict=True)
    )
    chunk = max(MIN_CHUNK, -(-total // tiling.programs))
    chunk = -(-chunk // tiling.keys) * tiling.keys
    items: list[tuple[int, int, int, int]] = []
    tiles: list[tuple[int, int]] = []
    bases: list[int] = []
    for index, segment in enumerate(plan.segments):
        bases.append(len(tiles))
        begins = range(firsts[index], segment.stop, chunk)
        for tile in range(counts[index]):
            tiles.append((len(items), len(begins)))
            row = tile * tiling.used
            items += [(index, row, n, min(n + chunk, segment.stop)) for n in begins]
    as_ints = (np.array(each, np.int32) for each in (items, tiles, bases))
    first, second, third = as_ints
    return first, second, third


def _first_key(start: int, tiling: Tiling) -> int:
    first = max(0, start - tiling.window + 1) if tiling.window else 0
    if not tiling.prefix:
        first = start
    return first // tiling.keys * tiling.keys


def to_device(arrays: Sequence[_Ints], device: torch.device) -> list[Tensor]:
    """All arrays in one copy, each with its shape, at multiples of 16 bytes."""
    sizes = [-(-each.size // 4) * 4 for each in arrays]
    flat = np.zeros(sum(sizes), np.int32)
    begin = 0
    for each, size in zip(arrays, sizes, strict=True):
        flat[begin : begin + each.size] = each.ravel()
        begin += size
    parts = torch.from_numpy(flat).to(device).split(sizes)
    return [part[: each.size].view(each.shape) for part, each in zip(parts, arrays, strict=True)]


class Tables:
    """All tables of one plan, made on first use."""

    def __init__(self, plan: TreePlan, sequences: tuple[int, ...]) -> None:
        """See :meth:`of`."""
        self._plan = plan
        self._widest = max(segment.length for segment in plan.segments)
        self._work: dict[Tiling, WorkTables] = {}
        self.rows = RowTables(*to_device(row_arrays(plan, sequences), plan.device))

    @staticmethod
    def of(plan: TreePlan, sequences: tuple[int, ...]) -> Tables:
        """The tables of a plan for caches in these rows of the page tables."""
        key = STATIC if STATIC in plan.prepared else ("triton", sequences)
        if key not in plan.prepared:
            plan.prepared[key] = Tables(plan, sequences)
        tables: Tables = plan.prepared[key]
        return tables

    def tiling(self, group: int, keys: Tensor, window: int | None) -> Tiling:
        """The tiling for some keys, ``[..., D]``."""
        return choose_tiling(self._widest * group, group, keys, window)

    def work(self, tiling: Tiling) -> WorkTables:
        """Work items of a tiling, computed once for all its layers."""
        if tiling not in self._work:
            arrays = work_arrays(self._plan, tiling)
            self._work[tiling] = WorkTables(*to_device(arrays, self._plan.device))
        return self._work[tiling]


def choose_tiling(rows: int, group: int, keys: Tensor, window: int | None) -> Tiling:
    """Tile sizes that fit the registers of a program.

    Args:
        rows: Packed rows of the largest block: nodes times group.
        group: Query heads per kv head.
        keys: Keys ``[..., kv heads, slots, D]``, for their type, width and device.
        window: Sliding window in tokens, or None.
    """
    fitting = 1 << max(4, (rows - 1).bit_length())
    programs = max(1, _programs(keys.device) // keys.shape[-3])
    if keys.dtype == torch.float32:  # multiplied from registers, without tensor cores
        return Tiling(group, 16, 16, window or 0, programs)
    half = keys.shape[-1] > 128
    rows = min(MOST_ROWS // 2 if half else MOST_ROWS, fitting)
    return Tiling(group, rows, 32 if half else 64, window or 0, programs)


@lru_cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
