"""Runs a program by one native call, see ``native/program.c``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels._native import LANES
from paceline.kernels._native_attention import (
    CACHE_TYPES,
    Block,
    BlockTables,
    CProbes,
    probe_rows,
)
from paceline.kernels.caches import LayerTable
from paceline.kernels.probes import Probe
from paceline.kernels.program import Kind, Operation, Pass, PassResult, Program
from paceline.kernels.trees import MAX_TREE_NODES, TreePlan

if TYPE_CHECKING:
    from paceline.kernels.linear import PackedMatrix

_WIDEST_HEAD = 512
_OUT_OF_MEMORY = 1


def _numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Operation(ctypes.Structure):
    _fields_ = [
        *_numbers("kind", "source", "delta", "out", "layer", "window", "q_heads", "kv_heads"),
        *_numbers("bf16"),
        *_pointers("weight", "second"),
        ("eps", ctypes.c_double),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = _numbers("width", "extent")


class _Program(ctypes.Structure):
    _fields_ = [
        *(*_numbers("operations", "selecting"), *_pointers("operation")),
        *(*_numbers("buffers"), *_pointers("buffer")),
        *_numbers("vocabulary", "q_heads", "kv_heads", "dim"),
        ("scale", ctypes.c_double),
    ]


class _Queries(ctypes.Structure):
    _fields_ = [*_numbers("count"), *_pointers("row", "out")]


class _Run(ctypes.Structure):
    _fields_ = [
        *(*_numbers("rows", "selected", "threads"), *_pointers("tokens", "position")),
        *(*_pointers("selection", "table"), *_numbers("sequences"), *_pointers("caches")),
        *(*_numbers("kv_type", "blocks"), *_pointers("block", "contexts", "context_block")),
        *(*_numbers("context_type"), *_pointers("inputs"), *_numbers("inputs_bf16")),
        *(*_numbers("tiles"), *_pointers("tile", "logits", "taps"), *_numbers("taps_bf16")),
        *_pointers("probes", "queries", "memory"),
    ]


_ZEROS = (ctypes.c_int32 * MAX_TREE_NODES)()
_RISING = (ctypes.c_int32 * (MAX_TREE_NODES + 1))(*range(MAX_TREE_NODES + 1))
_NODES = tuple(map(ctypes.addressof, (_ZEROS, _ZEROS, _RISING)))
"""Depths, paths and their starts of nodes that all are the first slot after the prefix."""


def supported(program: Program) -> bool:
    """Whether the compiled code can run a program: packed weights, and whole vectors."""
    matrices = [op.matrix for op in program.operations if op.matrix is not None]
    dim, logits = program.heads.dim, program.buffers[0]
    widths = [buffer.width for buffer in program.buffers if buffer is not logits]
    return (
        all(matrix.packed is not None for matrix in matrices)
        and not any(width % LANES for width in (*widths, dim))
        and dim <= _WIDEST_HEAD
    )


class NativeProgram:
    """A program as C structures. Safe to run on several threads: each has its own memory."""

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        """Translate a program that is :func:`supported`."""
        self._heads, self._layers, self._dtype = program.heads, program.layers, program.dtype
        self._kept: list[Any] = [program]
        self._hidden = program.buffers[program.operations[0].out].width
        self._vocabulary = program.buffers[0].width
        operations = (_Operation * len(program.operations))(
            *map(self._translate, program.operations)
        )
        buffers = (_Buffer * len(program.buffers))(
            *(_Buffer(b.width, b.extent) for b in program.buffers)
        )
        first, selected = program.operations[0], program.operations[program.selecting :]
        self._selected_taps = {op.layer for op in selected if op.kind == Kind.TAP}
        self._selects = bool(selected)
        self._program = _Program(
            operations=len(operations),
            selecting=program.selecting,
            operation=ctypes.addressof(operations),
            buffers=len(buffers),
            buffer=ctypes.addressof(buffers),
            vocabulary=_vocabulary(first),
            q_heads=program.heads.q_heads,
            kv_heads=program.heads.kv_heads,
            dim=program.heads.dim,
            scale=program.heads.dim**-0.5,
        )
        self._kept += [operations, buffers]
        self._address = ctypes.addressof(self._program)
        self._bytes = library.paceline_program_bytes
        self._run = library.paceline_run_program
        for function in (self._bytes, self._run):
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            function.restype = ctypes.c_int64
        self._memory = threading.local()

    def run(self, call: Pass) -> PassResult:
        """See :meth:`paceline.kernels.Executor.run`."""
        plan = call.plan
        tables = self._check_caches([cache.table for cache in call.caches], self._layers)
        self._check_segments(plan, tables)
        blocks = BlockTables.of(plan, self._heads.q_heads // self._heads.kv_heads)
        caches = _addresses(tables)
        tokens = None if call.tokens is None else call.tokens.contiguous()
        inputs = None if call.inputs is None else call.inputs.contiguous()
        selection = None if call.selection is None else call.selection.contiguous()
        selected = plan.rows if selection is None else selection.shape[0]
        logits = torch.empty(selected if self._selects else 0, self._vocabulary)
        taps = {
            layer: torch.empty(
                selected if layer in self._selected_taps else plan.rows,
                self._hidden,
                dtype=self._dtype,
            )
            for layer in call.taps
        }
        kept: list[Any] = []
        queries = {
            layer: torch.empty(len(rows), self._heads.q_heads, self._heads.dim)
            for layer, rows in call.queries.items()
        }
        run = _Run(
            rows=plan.rows,
            selected=logits.shape[0],
            threads=torch.get_num_threads(),
            tokens=None if tokens is None else tokens.data_ptr(),
            position=plan.positions.data_ptr(),
            selection=None if selection is None else selection.data_ptr(),
            table=call.table.data_ptr(),
            sequences=len(tables),
            caches=ctypes.addressof(caches),
            kv_type=CACHE_TYPES.index(tables[0].dtype),
            blocks=blocks.blocks,
            block=blocks.block,
            tiles=blocks.tiles,
            tile=blocks.tile,
            logits=logits.data_ptr(),
            taps=self._tap_table(taps, kept),
            taps_bf16=self._dtype == torch.bfloat16,
            probes=self._probe_table(call.probes, kept),
            queries=self._query_table(call.queries, queries, kept),
        )
        if inputs is not None:
            run.inputs, run.inputs_bf16 = inputs.data_ptr(), inputs.dtype == torch.bfloat16
        if call.contexts:
            self._add_contexts(run, call, kept)
        address = ctypes.addressof(run)
        memory = self._reserve(self._bytes(self._address, address))
        run.memory = memory.data_ptr()
        failed = self._run(self._address, address)
        if failed == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory for the scores of {plan.rows} rows: send smaller batches")
        if failed:
            raise IndexError(
                f"a token is outside of the vocabulary of {self._program.vocabulary}, or a "
                f"selected row outside of the batch of {plan.rows} rows"
            )
        return PassResult(logits, taps, queries)

    def _translate(self, op: Operation) -> _Operation:
        weights: list[int | None] = [None, None]
        if isinstance(op.table, Tensor):
            weights[0] = op.table.data_ptr()
        elif op.table is not None:
            weights[1] = self._matrix(op.table)
        if op.matrix is not None:
            assert op.matrix.packed is not None
            weights[0] = self._matrix(op.matrix.packed)
        for index, norm in enumerate(op.norms):
            weights[index] = norm.weight.data_ptr()
        return _Operation(
            kind=op.kind,
            source=op.source,
            delta=op.delta,
            out=op.out,
            layer=op.layer,
            window=op.window,
            q_heads=0 if op.heads is None else op.heads.q_heads,
            kv_heads=0 if op.heads is None else op.heads.kv_heads,
            bf16=isinstance(op.table, Tensor) and op.table.dtype == torch.bfloat16,
            weight=weights[0],
            second=weights[1],
            eps=op.norms[0].eps if op.norms else 0.0,
        )

    def _matrix(self, packed: PackedMatrix) -> int:
        """Address of a matrix for the kernels, which lives as long as the program."""
        matrix = packed.matrix()
        self._kept.append(matrix)
        return ctypes.addressof(matrix)

    def _add_contexts(self, run: _Run, call: Pass, kept: list[Any]) -> None:
        """The contexts as caches, and each block as nodes that attend to a prefix and its end."""
        tables = self._check_caches([context.cache.table for context in call.contexts], 1)
        for context, table in zip(call.contexts, tables, strict=True):
            if not 1 <= context.length <= table.capacity:
                raise ValueError(
                    f"a context has {context.length} slots, expected 1 to {table.capacity}"
                )
        caches, plan = _addresses(tables), call.plan
        blocks = (Block * len(plan.segments))(
            *(
                Block(segment.sequence, call.contexts[segment.sequence].length - 1, 1, row, *_NODES)
                for segment, row in zip(plan.segments, plan.offsets, strict=False)
            )
        )
        run.contexts, run.context_block = ctypes.addressof(caches), ctypes.addressof(blocks)
        run.context_type = CACHE_TYPES.index(tables[0].dtype)
        kept += [caches, blocks]

    def _check_caches(self, tables: Sequence[LayerTable | None], layers: int) -> list[LayerTable]:
        kv_heads, dim = self._heads.kv_heads, self._heads.dim
        found = [table for table in tables if table is not None]
        for index, table in enumerate(found):
            if (table.heads, table.dim, table.dtype) != (kv_heads, dim, found[0].dtype) or (
                table.layers < layers or table.dtype not in CACHE_TYPES
            ):
                raise ValueError(
                    f"cache {index} has {table.layers} layers of {table.dtype} "
                    f"[{table.heads}, {table.capacity}, {table.dim}], expected {layers} of "
                    f"float32, bfloat16 or int8 [{kv_heads}, n, {dim}], the same type in all caches"
                )
        return found

    @staticmethod
    def _check_segments(plan: TreePlan, tables: Sequence[LayerTable]) -> None:
        for segment in plan.segments:
            if segment.sequence >= len(tables) or segment.stop > tables[segment.sequence].capacity:
                raise ValueError(
                    f"a segment ends at slot {segment.stop} of sequence {segment.sequence}, but "
                    f"there are caches of {[table.capacity for table in tables]} slots"
                )

    def _tap_table(self, taps: Mapping[int, Tensor], kept: list[Any]) -> int | None:
        if not taps:
            return None
        table = (ctypes.c_void_p * self._layers)()
        for layer, tap in taps.items():
            table[layer] = tap.data_ptr()
        kept.append(table)
        return ctypes.addressof(table)

    def _probe_table(self, probes: Mapping[int, Sequence[Probe]], kept: list[Any]) -> int | None:
        if not probes:
            return None
        table = (CProbes * self._layers)()
        for layer, each in probes.items():
            rows = probe_rows(each)
            table[layer] = CProbes(len(rows), ctypes.addressof(rows))
            kept.append(rows)
        kept.append(table)
        return ctypes.addressof(table)

    def _query_table(
        self, wanted: Mapping[int, Sequence[int]], out: Mapping[int, Tensor], kept: list[Any]
    ) -> int | None:
        if not wanted:
            return None
        table = (_Queries * self._layers)()
        for layer, each in wanted.items():
            rows = (ctypes.c_int64 * len(each))(*each)
            table[layer] = _Queries(len(rows), ctypes.addressof(rows), out[layer].data_ptr())
            kept.append(rows)
        kept.append(table)
        return ctypes.addressof(table)

    def _reserve(self, size: int) -> Tensor:
        """This thread's memory, at least ``size`` bytes, with undefined content."""
        memory: Tensor | None = getattr(self._memory, "bytes", None)
        if memory is None or memory.numel() < size:
            memory = self._memory.bytes = torch.empty(size, dtype=torch.uint8)
        return memory


def _vocabulary(op: Operation) -> int:
    """Rows of the embedding, if a program begins with one."""
    if op.table is None:
        return 0
    return op.table.shape[0] if isinstance(op.table, Tensor) else op.table.outs


def _addresses(tables: Sequence[LayerTable]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tables))(*(table.address for table in tables))
