"""CPU backend of tree attention in C; ``native/attention.c`` defines its order of operations."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels._native import LANES
from paceline.kernels.probes import Probe
from paceline.kernels.trees import TreePlan, TreeSegment

if TYPE_CHECKING:
    from paceline.kernels.attention import AttentionBackend

_TYPES = (torch.float32, torch.bfloat16)
CACHE_TYPES = (*_TYPES, torch.int8)
"""Types of caches, in the order of ``native/cache_rows.h``."""

# Most rows of a tile: its scores of a chunk fit a core's cache, and keys are converted once for
# many rows.
_TILE_ROWS = 128


class Block(ctypes.Structure):
    """``Block`` of ``native/attention.h``."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("sequence", "start", "length", "row")],
        *[(name, ctypes.c_void_p) for name in ("depths", "paths", "path_starts")],
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("q_heads", "kv_heads", "dim", "window")],
        *[(name, ctypes.c_int64) for name in ("q_bf16", "kv_type", "out_bf16")],
        ("blocks", ctypes.c_int64),
        ("block", ctypes.c_void_p),
        ("tiles", ctypes.c_int64),
        ("tile", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]


class _Probe(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("block", "node", "weights", "stride")],
        ("out", ctypes.c_void_p),
    ]


class CProbes(ctypes.Structure):
    """``Probes`` of ``native/attention.h``."""

    _fields_ = [("count", ctypes.c_int64), ("probe", ctypes.c_void_p)]


_NO_PROBES = CProbes(count=0, probe=None)
_NO_PROBES_ADDRESS = ctypes.addressof(_NO_PROBES)


class CacheTable:
    """Addresses and strides of a plan's caches, per sequence."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._rows = (ctypes.c_int64 * (6 * len(keys)))()
        self.keys = ctypes.addressof(self._rows)
        self.values = self.keys + 24 * len(keys)
        self._shown: Sequence[Tensor] | None = None
        self._show(keys, values)

    @classmethod
    def of(cls, plan: TreePlan, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CacheTable:
        """The plan's table, set to the caches of one layer."""
        table: CacheTable | None = plan.prepared.get(cls)
        if table is None:
            table = plan.prepared[cls] = cls(keys, values)
        elif table._shown is not keys:
            table._show(keys, values)
        return table

    def _show(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        rows, at = self._rows, 0
        for cache in (*keys, *values):
            rows[at] = cache.data_ptr()
            rows[at + 1], rows[at + 2], _ = cache.stride()
            at += 3
        self._shown = keys


class NativeBackend:
    """Compiled attention; ``fallback`` runs shapes and types that the kernels do not support."""

    name = "native"
    pages = False

    def __init__(self, library: ctypes.CDLL, fallback: AttentionBackend) -> None:
        self._fallback = fallback
        self._attend = library.paceline_attend
        self._attend.argtypes = [ctypes.c_void_p] * 7
        self._attend.restype = ctypes.c_int64

    def attend(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        plan: TreePlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor,
        lse: Tensor | None,
        probes: Sequence[Probe] = (),
    ) -> None:
        """See :func:`paceline.kernels.tree_attention`.

        Raises:
            MemoryError: The scores of a tile could not be allocated.
        """
        key = ("native", q.shape[1], q.dtype, keys[0].dtype, out.dtype, window, scale)
        prepared = plan.prepared.get(key)
        if prepared is None:
            prepared = _supported(q, keys, values, out) and _prepare(
                plan, q, keys[0], out, scale, window
            )
            plan.prepared[key] = prepared
        if not prepared:
            self._fallback.attend(
                q, keys, values, plan, scale=scale, window=window, out=out, lse=lse, probes=probes
            )
            return
        q = q.contiguous()
        dense = out if out.is_contiguous() else torch.empty_like(q, dtype=out.dtype)
        table = CacheTable.of(plan, keys, values)
        failed = self._attend(
            prepared[0], table.keys, table.values, q.data_ptr(), dense.data_ptr(),
            None if lse is None else lse.data_ptr(), _probes(plan, probes),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the scores of {plan.rows} rows: send smaller batches")
        if dense is not out:
            out.copy_(dense)


def _probes(plan: TreePlan, probes: Sequence[Probe]) -> int:
    """Address of the probes for the kernels, cached in the plan for the other layers."""
    if not probes:
        return _NO_PROBES_ADDRESS
    key = ("native probes", *map(id, probes))
    kept = plan.prepared.get(key)
    if kept is None:
        rows = probe_rows(probes)
        made = CProbes(count=len(probes), probe=ctypes.addressof(rows))
        kept = plan.prepared[key] = (ctypes.addressof(made), made, rows, probes)
    address: int = kept[0]
    return address


def probe_rows(probes: Sequence[Probe]) -> ctypes.Array[_Probe]:
    """Probes as a C array."""
    rows = (_Probe * len(probes))()
    for row, probe in zip(rows, probes, strict=True):
        row.block, row.node, row.weights = probe.segment, probe.node, probe.weights
        row.stride, row.out = probe.out.stride(0), probe.out.data_ptr()
    return rows


def _supported(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> bool:
    caches = [*keys, *values]
    return (
        q.shape[2] % LANES == 0
        and {q.dtype, out.dtype} <= set(_TYPES)
        and keys[0].dtype in CACHE_TYPES
        and all(c.dtype == keys[0].dtype and c.stride(2) == 1 for c in caches)
    )


def _prepare(
    plan: TreePlan, q: Tensor, key: Tensor, out: Tensor, scale: float, window: int | None
) -> tuple[int, Any, BlockTables]:
    """Address of the plan for the kernels, and the objects that it points into."""
    tables = BlockTables.of(plan, q.shape[1] // key.shape[0])
    made = _Plan(
        q_heads=q.shape[1],
        kv_heads=key.shape[0],
        dim=q.shape[2],
        window=window or 0,
        q_bf16=q.dtype == torch.bfloat16,
        kv_type=CACHE_TYPES.index(key.dtype),
        out_bf16=out.dtype == torch.bfloat16,
        blocks=tables.blocks,
        block=tables.block,
        tiles=tables.tiles,
        tile=tables.tile,
        scale=scale,
    )
    return ctypes.addressof(made), made, tables


class BlockTables:
    """A plan's blocks, and their tiles, as C arrays; see ``native/attention.h``.

    Attributes:
        block: Address of ``Block [blocks]``.
        blocks: Number of blocks.
        tile: Address of the tiles, int64 ``[tiles, 3]``.
        tiles: Number of tiles.
    """

    def __init__(self, plan: TreePlan, group: int) -> None:
        """Make the tables for ``group`` query heads per kv head."""
        rows = (Block * len(plan.segments))()
        tiles: list[int] = []
        most = max(1, _TILE_ROWS // group)
        self._kept: list[Any] = [rows]
        for index, (segment, row) in enumerate(zip(plan.segments, plan.offsets, strict=False)):
            block, length = rows[index], segment.length
            block.sequence, block.start = segment.sequence, segment.start
            block.length, block.row = length, row
            if not segment.is_chain:
                self._kept.append(_fill_tree(block, segment))
            count = -(-length // most)  # tiles of almost equal sizes
            bounds = [length * i // count for i in range(count + 1)]
            for node, stop in pairwise(bounds):
                tiles += (index, node, stop - node)
        table = (ctypes.c_int64 * len(tiles))(*tiles)
        self._kept.append(table)
        self.blocks, self.tiles = len(rows), len(tiles) // 3
        self.block, self.tile = ctypes.addressof(rows), ctypes.addressof(table)

    @classmethod
    def of(cls, plan: TreePlan, group: int) -> BlockTables:
        """The tables, made once for each plan."""
        key = (cls, group)
        if key not in plan.prepared:
            plan.prepared[key] = cls(plan, group)
        tables: BlockTables = plan.prepared[key]
        return tables


def _fill_tree(block: Block, segment: TreeSegment) -> ctypes.Array[ctypes.c_int32]:
    """Set the depths and root-first paths of a tree in ``block``; returns their memory."""
    assert segment.parents is not None
    paths: list[list[int]] = []
    for node, parent in enumerate(segment.parents):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    starts = [0, *accumulate(map(len, paths))]
    numbers = [*segment.depths, *starts, *chain.from_iterable(paths)]
    table = (ctypes.c_int32 * len(numbers))(*numbers)
    block.depths = ctypes.addressof(table)
    block.path_starts = block.depths + 4 * len(paths)
    block.paths = block.path_starts + 4 * len(starts)
    return table
