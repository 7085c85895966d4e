"""A plan in the form that kernels read: small integer tables on the device.

Everything that depends on lengths, trees and their split into work items is computed on the host
and copied at once, so that a CUDA graph has only tables of fixed size at fixed addresses. Padding
rows belong to block -1; padding work items are empty.

A CUDA graph replays kernels with the grids and addresses of its capture. In a :class:`GraphPlan`
these are sized for the largest batch of a shape. Unused work items have no keys and end at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels._triton.jit.attention import NONE
from paceline.kernels.dense import MAX_PROBES, GraphProbes, Probe, ProbedBlock
from paceline.kernels.trees import (
    MAX_TREE_NODES,
    ContextSegment,
    LevelSegment,
    TreePlan,
    TreeSegment,
    plan_trees,
    send,
)

MASK_ALIGN = 64
"""Masks of a block begin at a multiple of this: no tile of keys is larger."""

MASK_WORDS = (MAX_TREE_NODES + MASK_ALIGN) // 32
MIN_CHUNK = 256
"""Least keys of a work item; fewer do not repay the launch of a program."""

STATIC = "static tables"
"""Key of a plan's tables at fixed addresses (:class:`GraphPlan`)."""

MAX_TILE_ROWS = 128
"""Maximum number of rows of a tile: with their outputs they fill the registers."""

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
        masks: int32 ``[M, MASK_WORDS]``: bit n of a row is set if it attends to slot n after the
            last multiple of ``MASK_ALIGN`` at or before the start of its block.
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
    kinds = {(type(segment), segment.length) for segment in plan.segments}
    if isinstance(plan.segments[0], (LevelSegment, ContextSegment)) and len(kinds) == 1:
        return _equal_blocks(plan.segments, sequences)
    # Plain lists: a step has many blocks of few rows, and each call of numpy takes microseconds.
    rows: list[tuple[int, int, int]] = []
    blocks: list[tuple[int, int, int, int]] = []
    masks: list[bytes] = []
    for index, (segment, first) in enumerate(zip(plan.segments, plan.offsets, strict=False)):
        rows += [(index, node, depth) for node, depth in enumerate(segment.depths)]
        blocks.append((first, segment.start, segment.length, sequences[segment.sequence]))
        shift = segment.start % MASK_ALIGN
        prefix = (1 << shift) - 1
        masks += [(prefix | p << shift).to_bytes(MASK_WORDS * 4, "little") for p in segment.paths]
    bits = np.frombuffer(b"".join(masks), np.int32).reshape(-1, MASK_WORDS)
    return np.array(rows, np.int32), np.array(blocks, np.int32), bits


def _equal_blocks(
    segments: Sequence[TreeSegment], sequences: Sequence[int]
) -> tuple[_Ints, _Ints, _Ints]:
    """The same for blocks of one length whose rows see the prefix, and of a context its end."""
    count, nodes, first = len(segments), segments[0].length, segments[0]
    starts = np.array([segment.start for segment in segments], np.int32)
    rows = np.empty((count, nodes, 3), np.int32)
    rows[..., 0] = np.arange(count)[:, None]
    rows[..., 1] = np.arange(nodes)
    rows[..., 2] = first.depths
    blocks = np.empty((count, 4), np.int32)
    blocks[:, 0] = np.arange(count) * nodes
    blocks[:, 1], blocks[:, 2] = starts, nodes
    blocks[:, 3] = [sequences[segment.sequence] for segment in segments]
    seen = (starts % MASK_ALIGN + first.paths[0]).astype(np.uint64)  # 64 bits or fewer
    bits = np.where(seen < 64, (np.uint64(1) << (seen % 64)) - np.uint64(1), ~np.uint64(0))
    masks = np.zeros((count, nodes, MASK_WORDS), np.int32)
    masks[..., :2] = bits.astype(np.uint64)[:, None].view(np.int32)[:, None]
    return rows.reshape(-1, 3), blocks, masks.reshape(-1, MASK_WORDS)


def path_words(ancestors: Tensor, starts: Tensor) -> Tensor:
    """Bits of paths that only the device knows, as in :class:`RowTables`.

    Args:
        ancestors: Of S blocks, bool ``[S, N, N]``.
        starts: Their starts, int ``[S]``.

    Returns:
        int32 ``[S N, MASK_WORDS]``.
    """
    count, nodes, _ = ancestors.shape
    device = ancestors.device
    at = torch.arange(nodes, device=device) + (starts.long() % MASK_ALIGN)[:, None]
    bits = torch.zeros(count, nodes, 32 * MASK_WORDS, dtype=torch.int32, device=device)
    bits.scatter_(2, at[:, None].expand(-1, nodes, -1), ancestors.int())
    places = torch.ones(32, dtype=torch.int32, device=device) << torch.arange(
        32, dtype=torch.int32, device=device
    )
    return (bits.view(count * nodes, MASK_WORDS, 32) * places).sum(-1, dtype=torch.int32)


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
    parts = send(torch.from_numpy(flat), device).split(sizes)
    return [part[: each.size].view(each.shape) for part, each in zip(parts, arrays, strict=True)]


class Tables:
    """All tables of one plan, made on first use."""

    def __init__(self, plan: TreePlan, sequences: tuple[int, ...]) -> None:
        """See :meth:`of`."""
        self._plan = plan
        self._widest = max(segment.length for segment in plan.segments)
        self._work: dict[Tiling, WorkTables] = {}
        rows, blocks, masks = to_device(row_arrays(plan, sequences), plan.device)
        if plan.ancestors is not None:
            masks |= path_words(plan.ancestors, blocks[:, 1])
        self.rows = RowTables(rows, blocks, masks)

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
    dim = keys.shape[-1]
    fitting = 1 << max(4, (rows - 1).bit_length())
    if keys.dtype == torch.float32:  # multiplied from registers, without tensor cores
        rows, slots = 16, 16
    elif dim > 128:
        rows, slots = min(MAX_TILE_ROWS // 2, fitting), 32
    else:
        rows, slots = min(MAX_TILE_ROWS, fitting), 64
    programs = _programs(keys.device, programs_per_sm(rows, dim, keys.dtype)) // keys.shape[-3]
    return Tiling(group, rows, slots, window or 0, max(1, programs))


def programs_per_sm(rows: int, dim: int, dtype: torch.dtype) -> int:
    """Programs that run side by side on a multiprocessor of sm_90, at least, as compiled.

    Their registers and shared memory allow it (tests/kernels/triton/test_cross_compile.py).
    """
    if large_tile(rows, dim):
        return 1
    return 3 if rows == 16 and dtype != torch.float32 else 2


def large_tile(rows: int, dim: int) -> bool:
    """Whether a tile takes the registers of 8 warps."""
    return rows * dim > 64 * 128


@lru_cache
def _programs(device: torch.device, per_sm: int) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    found = torch.cuda.get_device_properties(device)
    if found.shared_memory_per_multiprocessor < 200 << 10:  # as on sm_80, where one less fits
        per_sm = max(1, per_sm - 1)
    return per_sm * found.multi_processor_count


NO_NODE = -2  # -1 is the node of rows that pad a tile

GRAPH_PROBES = "graph probes"
"""Key of a plan's :class:`ProbeTable` at fixed addresses, which is refilled before each run."""


@dataclass(frozen=True)
class ProbeTable:
    """Probes in the form that the kernels read.

    A tile holds all heads of a group, so sums over them need no atomic operation and have the same
    bits in every run.

    Attributes:
        count: Probes of a block at most that attention records itself, 0 to ``MAX_PROBES``.
        table: int64 ``[S, MAX_PROBES, 4]``: node (-2: none), origin of its scores, strides between
            heads and between layers.
        base: float32 tensor that origins are relative to.
        wanted: Of blocks that a kernel of its own records, with weights or with more rows; int64
            ``[S, 4]``: whether the block is one, strides between heads and between layers, whether
            it records weights. None: of no block.
        noted: Origins of their rows, int64 ``[M]``; ``NONE``: not recorded.
        layer: Index of the layer among those recorded to one buffer.
        others: Probes that no kernel fills: a second one of a row, and those of groups that are
            larger than a tile.
    """

    count: int
    table: Tensor
    base: Tensor
    wanted: Tensor | None = None
    noted: Tensor | None = None
    others: tuple[Probe, ...] = ()
    layer: int = 0

    @classmethod
    def of(cls, probes: Sequence[Probe], plan: TreePlan, tiling: Tiling) -> ProbeTable:
        """Sort the probes of one call; with a window, their outputs are first filled with -inf, or
        with zeros for weights."""
        if isinstance(probes, GraphProbes):
            of_graph: ProbeTable = plan.prepared[GRAPH_PROBES]
            return replace(of_graph, layer=probes.layer)
        if not probes:
            if "no probes" not in plan.prepared:
                none = torch.zeros(4 * MAX_PROBES, dtype=torch.int64, device=plan.device)
                plan.prepared["no probes"] = none, torch.zeros(4, device=plan.device)
            return cls(0, *plan.prepared["no probes"])
        if tiling.window:
            for probe in probes:
                outside = 0.0 if probe.weights else -torch.inf
                probe.out[:, : plan.segments[probe.segment].start] = outside
        # The next layer records to the same addresses.
        key = tuple(
            (p.segment, p.node, p.weights, p.out.data_ptr(), p.out.stride(0)) for p in probes
        )
        if key not in plan.prepared:
            plan.prepared[key] = _sorted(probes, plan, tiling)
        table: ProbeTable = plan.prepared[key][0]
        others = tuple(probes[index] for index in plan.prepared[key][1])
        return replace(table, base=probes[0].out, others=others)


@dataclass(frozen=True)
class _ProbeArrays:
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


def _sorted(
    probes: Sequence[Probe], plan: TreePlan, tiling: Tiling
) -> tuple[ProbeTable, Sequence[int]]:
    """A table, relative to the output of the first probe, and the probes that it does not have."""
    if tiling.group > tiling.rows:
        return ProbeTable.of((), plan, tiling), range(len(probes))
    blocks = len(plan.segments)
    sizes = (blocks * MAX_PROBES * 4, blocks * 4, plan.rows)
    flat = np.empty(sum(sizes), np.int64)
    table, wanted, noted = np.split(flat, np.cumsum(sizes)[:2])
    arrays = _ProbeArrays(table.reshape(-1, MAX_PROBES, 4), wanted.reshape(-1, 4), noted)
    arrays.clear()
    base, others = probes[0].out, []
    for index, probe in enumerate(probes):
        row = plan.offsets[probe.segment] + probe.node
        origin = (probe.out.data_ptr() - base.data_ptr()) // 4
        strides = probe.out.stride(0), 0
        if not arrays.add(probe.segment, probe.node, row, origin, strides, probe.weights):
            others.append(index)
    count = int((arrays.table[..., 0] != NO_NODE).sum(1).max())
    sent = send(torch.from_numpy(flat), plan.device).split(sizes)
    if not wanted.any():
        return ProbeTable(count, sent[0], base), others
    return ProbeTable(count, sent[0], base, sent[1], sent[2]), others


Shape = tuple[torch.dtype, tuple[int, ...]]
"""Type, int32 or int64, and shape of a table."""


class Staging:
    """Tables of integers at fixed addresses on a device, which one copy fills.

    Attributes:
        host: The tables in memory of the host.
        device: The same on the device.
    """

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        """Allocate tables of zeros."""
        counts = [math.prod(shape) * dtype.itemsize // 4 for dtype, shape in shapes]
        sizes = [-(-count // 4) * 4 for count in counts]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None
        views: list[list[Tensor]] = []
        for memory in (self._host, self._device):
            parts = zip(memory.split(sizes), counts, shapes, strict=True)
            views.append([part[:n].view(dtype).view(shape) for part, n, (dtype, shape) in parts])
        self.host: list[NDArray[Any]] = [part.numpy() for part in views[0]]
        self.device = views[1]

    def wait(self) -> None:
        """Wait until the last copy has read the host's tables."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy the tables. The host does not wait."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class PassTables:
    """Positions, rows and work items of one pass, as tables of a :class:`Staging`."""

    @staticmethod
    def shapes(rows: int, blocks: int, tilings: Sequence[Tiling]) -> list[Shape]:
        """Shapes for at most ``rows`` packed rows of at most ``blocks`` blocks."""
        found: list[tuple[int, ...]] = [(rows, 3), (blocks, 4), (rows, MASK_WORDS)]
        for tiling in tilings:
            # Of each block whole tiles and one that is not; no row has more than its own.
            tiles = rows * -(-tiling.group // tiling.used)
            tiles = min(tiles, blocks + rows * tiling.group // tiling.used)
            found += [(tiling.programs + tiles, 4), (tiles, 2), (blocks,)]
        return [(torch.int64, (rows,)), *((torch.int32, shape) for shape in found)]

    def __init__(
        self, staging: Staging, first: int, rows: int, tilings: Sequence[Tiling], longest: int
    ) -> None:
        """Take the tables from number ``first`` on; no position is above ``longest``."""
        count = 4 + 3 * len(tilings)
        self._rows, self._tilings, self._longest = rows, tilings, longest
        self._host = staging.host[first : first + count]
        self.positions, *tables = staging.device[first : first + count]
        self._tables = RowTables(*tables[:3])
        self._work = {
            tiling: WorkTables(*tables[3 + 3 * index : 6 + 3 * index])
            for index, tiling in enumerate(tilings)
        }

    def plan(self, ancestors: Tensor | None = None) -> TreePlan:
        """The plan. It has no segments: kernels read its tables.

        Args:
            ancestors: Paths that only the device knows, bool ``[S, N, N]``.
        """
        tables = self._tables
        if ancestors is not None:
            words = path_words(ancestors, tables.blocks[: len(ancestors), 1])
            tables = replace(tables, masks=tables.masks | words)
        static = {STATIC: StaticTables(tables, self._work)}
        device = self.positions.device
        return TreePlan((), (0, self._rows), self.positions, self._longest, device, None, static)

    def fill(self, plan: TreePlan | None, sequences: Sequence[int]) -> None:
        """Write a batch to the host's tables.

        Args:
            plan: Its blocks, on the CPU; None: there are none.
            sequences: Row of the page tables of each sequence, or its number.
        """
        positions, rows, blocks, masks, *work = self._host
        rows[:, 0] = -1
        for items in work[::3]:
            items[:] = 0
        if plan is None:
            return
        found = (plan.positions.numpy(), *row_arrays(plan, sequences))
        for section, array in zip((positions, rows, blocks, masks), found, strict=True):
            section[: len(array)] = array
        for index, tiling in enumerate(self._tilings):
            arrays = work_arrays(plan, tiling)
            for section, array in zip(work[3 * index : 3 * index + 3], arrays, strict=True):
                section[: len(array)] = array


class GraphPlan:
    """A plan for up to ``rows`` packed rows over paged caches, refilled before each run.

    Attributes:
        rows: Packed rows, padding included.
        plan: The plan for the decoder.
        tokens: Token of each row, int64 ``[rows]``; 0 in padding.
    """

    def __init__(
        self,
        rows: int,
        keys: Tensor,
        tilings: Sequence[Tiling],
        longest: int,
        *,
        probes: bool = False,
        weights: bool = False,
    ) -> None:
        """Allocate the tables.

        Args:
            rows: Packed rows.
            keys: Key pool ``[pages, Hkv, page_size, D]``, for its device.
            tilings: Tiling of each kind of layer; see :func:`tilings_for`.
            longest: Largest possible position.
            probes: Whether layers record scores.
            weights: Whether they record weights, or scores of more rows than attention records.
        """
        self.rows = rows
        shapes = [(torch.int64, (rows,)), *PassTables.shapes(rows, rows, tilings)]
        if probes:
            shapes += [
                (torch.int64, (rows, MAX_PROBES, 4)),
                (torch.int64, (rows, 4)),
                (torch.int64, (rows,)),
            ]
        self._staging = Staging(shapes, keys.device)
        self._pass = PassTables(self._staging, 1, rows, tilings, longest)
        self.tokens, self.plan = self._staging.device[0], self._pass.plan()
        self._probes: _ProbeArrays | None = None
        self._base = torch.zeros(4, device=keys.device)
        if probes:
            self._probes = _ProbeArrays(*self._staging.host[-3:])
            table, wanted, noted = self._staging.device[-3:]
            both = (wanted, noted) if weights else (None, None)
            self.plan.prepared[GRAPH_PROBES] = ProbeTable(MAX_PROBES, table, self._base, *both)
        self.fill([], [], [])

    def fill(
        self,
        tokens: Sequence[int],
        segments: Sequence[TreeSegment],
        table_rows: Sequence[int],
        probed: Sequence[ProbedBlock] = (),
    ) -> None:
        """Write another batch, possibly empty, to the tables.

        Args:
            tokens: Packed tokens, at most ``rows``.
            segments: Their blocks.
            table_rows: Row of the page tables of each sequence.
            probed: Blocks whose scores are recorded, each once.
        """
        self._staging.wait()
        self._staging.host[0][: len(tokens)] = tokens
        self._staging.host[0][len(tokens) :] = 0
        plan = plan_trees(segments) if tokens else None
        self._pass.fill(plan, table_rows)
        if self._probes is not None:
            self._probes.clear()
            for each in probed:
                assert plan is not None
                layers, nodes, heads, _ = each.out.stride()
                first = (each.out.data_ptr() - self._base.data_ptr()) // 4
                for index, node in enumerate(each.nodes):
                    self._probes.add(
                        each.block, node, plan.offsets[each.block] + node, first + index * nodes,
                        (heads, layers), each.weights,
                    )  # fmt: skip
        self._staging.send()


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
