"""Runs a program by one native call, see ``native/program.c``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels._native import LANES
from paceline.kernels._native_attention import BlockTables, CProbes, probe_rows
from paceline.kernels.caches import LayerTable
from paceline.kernels.probes import Probe
from paceline.kernels.program import Operation, Pass, PassResult, Program

_WIDEST_HEAD = 512
_OUT_OF_MEMORY = 1


def _numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Operation(ctypes.Structure):
    _fields_ = [
        *_numbers("kind", "source", "delta", "out", "layer", "window", "bf16"),
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
        *(*_numbers("kv_bf16", "blocks"), *_pointers("block")),
        *(*_numbers("tiles"), *_pointers("tile", "logits", "taps"), *_numbers("taps_bf16")),
        *_pointers("probes", "queries", "memory"),
    ]


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
        table = program.operations[0].table
        assert table is not None
        self._program = _Program(
            operations=len(operations),
            selecting=program.selecting,
            operation=ctypes.addressof(operations),
            buffers=len(buffers),
            buffer=ctypes.addressof(buffers),
            vocabulary=table.shape[0],
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
        """See :meth:`Program.run`."""
        plan = call.plan
        tables = self._check_caches(call)
        blocks = BlockTables.of(plan, self._heads.q_heads // self._heads.kv_heads)
        caches = (ctypes.c_void_p * len(tables))(*(table.address for table in tables))
        tokens = call.tokens.contiguous()
        selection = None if call.selection is None else call.selection.contiguous()
        selected = plan.rows if selection is None else selection.shape[0]
        logits = torch.empty(selected, self._vocabulary)
        taps = {i: torch.empty(plan.rows, self._hidden, dtype=self._dtype) for i in call.taps}
        kept: list[Any] = []
        queries = {
            layer: torch.empty(len(rows), self._heads.q_heads, self._heads.dim)
            for layer, rows in call.queries.items()
        }
        run = _Run(
            rows=plan.rows,
            selected=selected,
            threads=torch.get_num_threads(),
            tokens=tokens.data_ptr(),
            position=plan.positions.data_ptr(),
            selection=None if selection is None else selection.data_ptr(),
            table=call.table.data_ptr(),
            sequences=len(tables),
            caches=ctypes.addressof(caches),
            kv_bf16=tables[0].dtype == torch.bfloat16,
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
        if op.table is not None:
            weights[0] = op.table.data_ptr()
        if op.matrix is not None:
            assert op.matrix.packed is not None
            matrix = op.matrix.packed.matrix()
            self._kept.append(matrix)
            weights[0] = ctypes.addressof(matrix)
        for index, norm in enumerate(op.norms):
            weights[index] = norm.weight.data_ptr()
        return _Operation(
            kind=op.kind,
            source=op.source,
            delta=op.delta,
            out=op.out,
            layer=op.layer,
            window=op.window,
            bf16=op.table is not None and op.table.dtype == torch.bfloat16,
            weight=weights[0],
            second=weights[1],
            eps=op.norms[0].eps if op.norms else 0.0,
        )

    def _check_caches(self, call: Pass) -> list[LayerTable]:
        tables = [cache.table for cache in call.caches]
        kv_heads, dim = self._heads.kv_heads, self._heads.dim
        found = [table for table in tables if table is not None]
        for index, table in enumerate(found):
            if (table.shape[0], table.shape[2], table.dtype) != (kv_heads, dim, found[0].dtype) or (
                table.layers < self._layers or table.dtype not in (torch.float32, torch.bfloat16)
            ):
                raise ValueError(
                    f"cache {index} has {table.layers} layers of {table.dtype} {table.shape}, "
                    f"expected {self._layers} of float32 or bfloat16 [{kv_heads}, n, {dim}], "
                    "the same type in all caches"
                )
        for segment in call.plan.segments:
            if segment.sequence >= len(found) or segment.stop > found[segment.sequence].shape[1]:
                raise ValueError(
                    f"a segment ends at slot {segment.stop} of sequence {segment.sequence}, but "
                    f"there are caches of {[table.shape[1] for table in found]} slots"
                )
        return found

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
