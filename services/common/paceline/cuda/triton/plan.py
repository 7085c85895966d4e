"""A plan in the form that kernels read: small integer tables on the device.

Everything that depends on lengths, trees and their split into work items is computed on the host
and copied at once, so that a CUDA graph has only tables of fixed size at fixed addresses. Padding
rows belong to block -1.

A CUDA graph replays kernels with the grids and addresses of its capture. In a :class:`GraphPlan`
tables have room for the largest batch of a shape, and the number of work items is in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from paceline.cuda.triton.jit.attention import TILE_FIELDS
from paceline.cuda.triton.jit.candidates import pack_paths
from paceline.cuda.triton.probes import ProbeArrays, ProbeTable, sort_probes
from paceline.cuda.triton.tiles import Ints, Room, Tiling, part_row_bytes, plan_work
from paceline.kernels.attention import MAX_PROBES, GraphProbes, Probe, ProbedBlock
from paceline.kernels.trees import MAX_TREE_NODES, EqualBlocks, QueryBlock, TreePlan, send

MASK_ALIGN = 64  # masks of a block begin at a multiple of this: no tile of keys is larger
MASK_WORDS = (MAX_TREE_NODES + MASK_ALIGN) // 32
Shape = tuple[torch.dtype, tuple[int, ...]]  # type and shape of a table


@dataclass(frozen=True)
class RowTables:
    """Tables of packed rows and blocks."""

    rows: Tensor  # int32 `[M, 3]`: block, node, depth
    # int32 `[S, 4]`: first packed row, start, length, row of the page tables (or number of the
    # sequence).
    blocks: Tensor
    # Paths that only the device knows, as of `path_words`; None: positions and lists of slots say
    # what a row sees.
    masks: Tensor | None = None


@dataclass(frozen=True)
class WorkTables:
    """:class:`~paceline.cuda.triton.tiles.Work` on the device."""

    spans: Tensor
    items: Tensor
    tiles: Tensor
    places: Tensor
    steps: Tensor
    part_rows: int = field(kw_only=True)


def row_arrays(blocks: Sequence[QueryBlock], sequences: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the arrays of :class:`RowTables`, without masks, of packed blocks. ``sequences`` has
    the number of each sequence in the tables of blocks."""
    if isinstance(blocks, EqualBlocks):
        first, count = blocks.first, len(blocks)
        table = np.empty((count, 4), np.int32)
        table[:, 0] = np.arange(count) * first.length
        table[:, 1], table[:, 2], table[:, 3] = blocks.starts, first.length, sequences[:count]
        return _equal_rows(count, first.depths), table
    # Plain lists: a step has many blocks of few rows, and each call of numpy takes microseconds.
    rows: list[tuple[int, int, int]] = []
    block_rows: list[tuple[int, int, int, int]] = []
    offset = 0
    for index, block in enumerate(blocks):
        rows += [(index, node, depth) for node, depth in enumerate(block.depths)]
        block_rows.append((offset, block.start, block.length, sequences[block.sequence]))
        offset += block.length
    return np.array(rows, np.int32), np.array(block_rows, np.int32)


@lru_cache(64)
def _equal_rows(count: int, depths: tuple[int, ...]) -> Ints:
    """Return the rows of blocks with equal depths, as of :attr:`RowTables.rows`."""
    rows = np.empty((count, len(depths), 3), np.int32)
    rows[..., 0] = np.arange(count)[:, None]
    rows[..., 1] = np.arange(len(depths))
    rows[..., 2] = depths
    return rows.reshape(-1, 3)


def path_words(ancestors: Tensor, starts: Tensor) -> Tensor:
    """Return the bits of the paths of S blocks, bool ``[S, N, N]``, rows dense, that only the
    device knows, by the starts of the blocks, int32 ``[S]``.

    Returns int32 ``[S N, MASK_WORDS]``: bit n of a row is set if it attends to slot n after the
    last multiple of ``MASK_ALIGN`` at or before the start of its block, a node of it.
    """
    count, nodes, _ = ancestors.shape
    words = torch.empty(count * nodes, MASK_WORDS, dtype=torch.int32, device=ancestors.device)
    pack_paths[(count, nodes)](
        ancestors.view(torch.uint8), starts, words, *ancestors.stride()[:2], starts.stride(0),
        ALIGN=MASK_ALIGN, WORDS=MASK_WORDS, ROOM=triton.next_power_of_2(MASK_WORDS), num_warps=1,
    )  # fmt: skip
    return words


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return all arrays in one copy, each with its type and shape, at multiples of 16 bytes."""
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    flat = np.zeros(sum(sizes), np.uint8)
    begin = 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        begin += size
    parts = send(torch.from_numpy(flat), device).split(sizes)
    return [
        part[: array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


@dataclass(frozen=True)
class Places:
    """Where contiguous caches lie."""

    # Origin, head stride and slot stride of the keys and values of each sequence, int64 `[n, 2,
    # 3]`. Unit: elements.
    origins: Tensor
    tables: Tensor  # int32 zeros `[4]`, in the place of page tables
    wide: bool  # whether all of it allows wide loads


@dataclass
class PlanTables:
    """What the Triton kernels read of a plan; each table is made at its first use."""

    # Row tables, by the rows of the page tables of all sequences.
    rows: dict[tuple[int, ...], RowTables] = field(default_factory=dict)
    work: dict[tuple[Tiling, int], WorkTables] = field(default_factory=dict)  # work, by tiling
    # Caches that are contiguous, by their places.
    places: dict[tuple[tuple[int, ...], ...], Places] = field(default_factory=dict)
    # Tables of probes by their contents, with the probes that no kernel fills.
    probes: dict[tuple[Any, ...], tuple[ProbeTable, tuple[int, ...]]] = field(default_factory=dict)
    # int64 zeros `[32]`, in the place of tables that a call does not have.
    zeros: Tensor | None = None

    @staticmethod
    def of(plan: TreePlan) -> PlanTables:
        if plan.triton is None:
            plan.triton = PlanTables()
        tables: PlanTables = plan.triton
        return tables

    def rows_of(self, plan: TreePlan, sequences: tuple[int, ...]) -> RowTables:
        """Return rows and blocks, for caches in these rows of the page tables."""
        if sequences not in self.rows:
            rows, blocks = to_device(row_arrays(plan.blocks, sequences), plan.device)
            masks = None
            if plan.ancestors is not None:
                masks = path_words(plan.ancestors, blocks[:, 1])
            self.rows[sequences] = RowTables(rows, blocks, masks)
        return self.rows[sequences]

    def work_of(self, plan: TreePlan, tiling: Tiling, row_bytes: int) -> WorkTables:
        """Work items of a tiling, computed once for all its layers."""
        key = tiling, row_bytes
        if key not in self.work:
            work = plan_work(plan.blocks, tiling, row_bytes)
            self.work[key] = WorkTables(
                *to_device(work.arrays, plan.device), part_rows=work.part_rows
            )
        return self.work[key]

    def places_of(self, where: tuple[tuple[int, ...], ...], base: Tensor, *, wide: bool) -> Places:
        """Return the table of caches in these places, relative to ``base``."""
        if where not in self.places:  # shared with the row kernels
            origins = send(torch.tensor(where, dtype=torch.int64), base.device)
            tables = origins.new_zeros(4, dtype=torch.int32)
            self.places[where] = Places(origins, tables, wide)
        return self.places[where]

    def captured_places(self, base: Tensor) -> Places | None:
        """Return the places of caches in a table of a CUDA graph; None: there is none."""
        return None

    def probes_of(self, plan: TreePlan, probes: Sequence[Probe], tiling: Tiling) -> ProbeTable:
        """Return the probes of one call; with a window, their outputs are first filled with -inf,
        or with zeros for weights."""
        if isinstance(probes, GraphProbes):
            return replace(self.probes_of_graph(), layer=probes.layer)
        if not probes:
            none = self.none(plan.device)
            return ProbeTable(0, none, none.view(torch.float32))
        if tiling.window:
            for probe in probes:
                outside = 0.0 if probe.weights else -torch.inf
                probe.out[:, : plan.blocks[probe.block].start] = outside
        # The next layer records to the same addresses.
        key = tuple((p.block, p.node, p.weights, p.out.data_ptr(), p.out.stride(0)) for p in probes)
        if key not in self.probes and tiling.group > tiling.rows:
            self.probes[key] = self.probes_of(plan, (), tiling), tuple(range(len(probes)))
        elif key not in self.probes:
            self.probes[key] = sort_probes(probes, plan)
        table, others = self.probes[key]
        return replace(table, base=probes[0].out, others=tuple(probes[index] for index in others))

    def probes_of_graph(self) -> ProbeTable:
        """Return the probes in tables of a CUDA graph."""
        raise ValueError("only the plans of CUDA graphs have probes in fixed tables")

    def none(self, device: torch.device) -> Tensor:
        """``zeros``."""
        if self.zeros is None:
            self.zeros = torch.zeros(32, dtype=torch.int64, device=device)
        return self.zeros


class FixedTables(PlanTables):
    """Tables at fixed addresses, which are refilled before each run."""

    def __init__(
        self,
        rows: RowTables,
        work: Mapping[Tiling, WorkTables],
        places: Mapping[int, Places],
        probes: ProbeTable | None = None,
    ) -> None:
        """Take the tables of a pass: rows and blocks, work items by tiling, places of contiguous
        caches by the address of what they are relative to, and what is recorded."""
        super().__init__()
        self._rows, self._work, self._places, self._probes = rows, work, places, probes

    def rows_of(self, plan: TreePlan, sequences: tuple[int, ...]) -> RowTables:
        return self._rows

    def work_of(self, plan: TreePlan, tiling: Tiling, row_bytes: int) -> WorkTables:
        return self._work[tiling]

    def captured_places(self, base: Tensor) -> Places | None:
        return self._places.get(base.data_ptr())

    def probes_of_graph(self) -> ProbeTable:
        return self._probes or super().probes_of_graph()


class Staging:
    """Tables of integers at fixed addresses on a device, which one copy fills."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        """Allocate tables of zeros."""
        counts = [math.prod(shape) * dtype.itemsize for dtype, shape in shapes]
        sizes = [-(-count // 16) * 16 for count in counts]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._host, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None
        views: list[list[Tensor]] = []
        for memory in (self._host, self._device):
            parts = zip(memory.split(sizes), counts, shapes, strict=True)
            views.append([part[:n].view(dtype).view(shape) for part, n, (dtype, shape) in parts])
        # The tables in memory of the host.
        self.host: list[NDArray[Any]] = [part.numpy() for part in views[0]]
        self.device = views[1]  # the tables on the device

    def wait(self) -> None:
        """Wait until the last copy has read the host's tables."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy the tables. The host does not wait."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


@dataclass(frozen=True)
class TableShape:
    """What the tables of a pass have room for."""

    rows: int  # packed rows
    tilings: Sequence[Tiling]  # tiling of each kind of layer; see `tilings_for`
    max_position: int  # largest possible position
    blocks: int  # query blocks
    row_bytes: int  # see `part_row_bytes`

    @classmethod
    def of(
        cls, rows: int, blocks: int, tilings: Sequence[Tiling], max_position: int, keys: Tensor
    ) -> TableShape:
        """Return the shape for some keys, ``[..., kv heads, slots, D]``."""
        row_bytes = part_row_bytes(keys.shape[-3], keys.shape[-1])
        return cls(rows, tilings, max_position, blocks, row_bytes)

    def room(self, tiling: Tiling) -> Room:
        """Return room for the work of a kind of layer."""
        return Room.for_rows(self.rows, self.blocks, tiling, self.max_position, self.row_bytes)

    @property
    def tables(self) -> list[Shape]:
        """Types and shapes of its tables."""
        shapes: list[Shape] = [
            (torch.int64, (self.rows,)),
            (torch.int32, (self.rows, 3)),
            (torch.int32, (self.blocks, 4)),
        ]
        for room in map(self.room, self.tilings):
            shapes += [
                (torch.int32, (1, 4)), (torch.int32, (room.items,)),
                (torch.int32, (room.tiles, TILE_FIELDS.value)), (torch.int32, (self.rows, 4)),
                (torch.uint8, (room.steps,)),
            ]  # fmt: skip
        return shapes


class PassTables:
    """Positions, rows and work items of one pass, as tables of a :class:`Staging`."""

    def __init__(self, staging: Staging, first: int, shape: TableShape) -> None:
        """Take the tables of ``shape.tables`` from number ``first`` on."""
        self._shape = shape
        count = len(shape.tables)
        self._host = staging.host[first : first + count]
        self.positions, rows, blocks, *work = staging.device[first : first + count]
        self._rows = RowTables(rows, blocks)
        self._rooms = [shape.room(tiling) for tiling in shape.tilings]
        self._work = {
            tiling: WorkTables(
                *work[5 * index : 5 * index + 5], part_rows=self._rooms[index].part_rows
            )
            for index, tiling in enumerate(shape.tilings)
        }

    def plan(
        self,
        ancestors: Tensor | None = None,
        places: Mapping[int, Places] | None = None,
        probes: ProbeTable | None = None,
    ) -> TreePlan:
        """Return the plan, with paths that only the device knows, bool ``[S, N, N]``, and tables as
        of :class:`FixedTables`. It has no blocks: kernels read its tables."""
        rows = self._rows
        if ancestors is not None:
            words = path_words(ancestors, rows.blocks[: len(ancestors), 1])
            rows = RowTables(rows.rows, rows.blocks, words)
        shape, positions = self._shape, self.positions
        return TreePlan(
            (), (0, shape.rows), positions, shape.max_position, positions.device,
            triton=FixedTables(rows, self._work, places or {}, probes),
        )  # fmt: skip

    def fill(
        self,
        blocks: Sequence[QueryBlock],
        sequences: Sequence[int],
        positions: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> bool:
        """Write a batch, possibly empty, to the host's tables; returns whether there is room for
        its work.

        ``sequences`` has the row of the page tables of each sequence, or its number, ``positions``
        the absolute position of each row; None: slots are positions.
        """
        place, rows, table, *tables = self._host
        rows[:, 0] = -1
        for spans in tables[::5]:
            spans[:] = 0
        if not blocks:
            return True
        if positions is None and isinstance(blocks, EqualBlocks):
            positions = np.add.outer(blocks.starts, blocks.first.depths).ravel()
        elif positions is None:
            positions = [block.start + depth for block in blocks for depth in block.depths]
        place[: len(positions)] = positions
        for goal, array in zip((rows, table), row_arrays(blocks, sequences), strict=True):
            goal[: len(array)] = array
        for index, tiling in enumerate(self._shape.tilings):
            work = plan_work(blocks, tiling, self._shape.row_bytes)
            if not self._rooms[index].holds(work):
                return False
            for goal, values in zip(tables[5 * index :], work.arrays, strict=False):
                goal[: len(values)] = values
        return True


class GraphPlan:
    """A plan for up to ``rows`` packed rows over paged caches, refilled before each run."""

    def __init__(
        self,
        rows: int,
        keys: Tensor,
        tilings: Sequence[Tiling],
        max_position: int,
        *,
        probes: bool = False,
        weights: bool = False,
    ) -> None:
        """Allocate the tables.

        Args:
            rows: Packed rows.
            keys: Key pool ``[pages, Hkv, page_size, D]``, for its device.
            tilings: Tiling of each kind of layer; see
                :func:`~paceline.cuda.triton.tiles.tilings_for`.
            max_position: Largest possible position.
            probes: Whether layers record scores.
            weights: Whether they record weights, or scores of more rows than attention records.
        """
        self.rows = rows  # packed rows, padding included
        shape = TableShape.of(rows, rows, tilings, max_position, keys)
        shapes = [(torch.int64, (rows,)), *shape.tables]
        if probes:
            shapes += [
                (torch.int64, (rows, MAX_PROBES, 4)),
                (torch.int64, (rows, 4)),
                (torch.int64, (rows,)),
            ]
        self._staging = Staging(shapes, keys.device)
        self._pass = PassTables(self._staging, 1, shape)
        self.tokens = self._staging.device[0]  # token of each row, int64 `[rows]`; 0 in padding
        self._probes: ProbeArrays | None = None
        self._base = torch.zeros(4, device=keys.device)
        recorded = None
        if probes:
            self._probes = ProbeArrays(*self._staging.host[-3:])
            table, wanted, noted = self._staging.device[-3:]
            both = (wanted, noted) if weights else (None, None)
            recorded = ProbeTable(MAX_PROBES, table, self._base, *both)
        self.plan = self._pass.plan(probes=recorded)  # the plan for the decoder
        # Blocks, and rows of the page tables, that the host's tables are of; None: of no batch.
        self._filled: tuple[object, ...] | None = None
        self.fill([], [], [])

    def prepare(self, blocks: Sequence[QueryBlock], table_rows: Sequence[int]) -> bool:
        """Write all of a batch but its tokens and probes to the host's tables, if they do not have
        it: while a GPU computes, for a :meth:`fill` of the same batch that comes next. Returns
        whether it has room there."""
        filled = tuple(blocks), tuple(table_rows)
        if filled == self._filled:
            return True
        self._staging.wait()
        self._filled = None
        if not self._pass.fill(blocks, table_rows):
            return False
        self._filled = filled
        return True

    def fill(
        self,
        tokens: Sequence[int],
        blocks: Sequence[QueryBlock],
        table_rows: Sequence[int],
        probed: Sequence[ProbedBlock] = (),
    ) -> bool:
        """Write another batch, possibly empty, to the tables: at most ``rows`` packed tokens, their
        blocks, the rows of the page tables of all sequences, and blocks whose scores are recorded,
        each once. Returns whether there is room for its work: not for very many chunks of keys."""
        if not self.prepare(blocks, table_rows):
            return False
        self._staging.wait()
        self._staging.host[0][: len(tokens)] = tokens
        self._staging.host[0][len(tokens) :] = 0
        if self._probes is not None:
            self._probes.clear()
            offsets = [0, *accumulate(block.length for block in blocks)]
            for recorded in probed:
                layers, nodes, heads, _ = recorded.out.stride()
                first = (recorded.out.data_ptr() - self._base.data_ptr()) // 4
                for index, node in enumerate(recorded.nodes):
                    self._probes.add(
                        recorded.block, node, offsets[recorded.block] + node, first + index * nodes,
                        (heads, layers), recorded.weights,
                    )  # fmt: skip
        self._staging.send()
        return True
