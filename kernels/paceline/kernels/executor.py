"""Runs programs: on the CPU by one native call (``native/program.c``), elsewhere one operation at a
time (:mod:`paceline.kernels.operations`)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels._native import address, library
from paceline.kernels.attention import Probe
from paceline.kernels.caches import LayerTable
from paceline.kernels.delta import DeltaPass
from paceline.kernels.operations import run_one_by_one, whole_norms
from paceline.kernels.program import Kind, Operation, Pass, PassResult, Program
from paceline.kernels.structures import (
    CODES,
    LANES,
    MAX_HEAD_DIM,
    PRODUCTS,
    QUERY_TILE_ROWS,
    CBuffer,
    CMatrix,
    COperation,
    CProbe,
    CProbes,
    CProgram,
    CQueries,
    CQueryBlock,
    CRun,
)
from paceline.kernels.trees import MAX_TREE_NODES, QueryBlock, TreePlan

if TYPE_CHECKING:
    from paceline.kernels.linear import PackedMatrix

# Types of caches, in the order of `native/cache_rows.h`.
CACHE_TYPES = (torch.float32, torch.bfloat16, torch.int8)
_OUT_OF_MEMORY = 1
_ZEROS = (ctypes.c_int32 * MAX_TREE_NODES)()
_RISING = (ctypes.c_int32 * (MAX_TREE_NODES + 1))(*range(MAX_TREE_NODES + 1))
# Depths, paths and their starts of nodes that all are the first slot after the prefix.
_NODES = tuple(map(ctypes.addressof, (_ZEROS, _ZEROS, _RISING)))


class NativeTables:
    """A plan's blocks, and their tiles, as C arrays; see ``native/attention.h``."""

    def __init__(self, plan: TreePlan, group: int) -> None:
        """Make the tables for ``group`` query heads per kv head."""
        rows = (CQueryBlock * len(plan.blocks))()
        tiles: list[int] = []
        max_nodes = max(1, QUERY_TILE_ROWS // group)
        self._kept: list[Any] = [rows]
        for index, (block, row) in enumerate(zip(plan.blocks, plan.offsets, strict=False)):
            entry, length = rows[index], block.length
            entry.sequence, entry.start = block.sequence, block.start
            entry.length, entry.row = length, row
            if not block.is_chain:
                self._kept.append(_fill_tree(entry, block))
            count = -(-length // max_nodes)  # tiles of almost equal sizes
            bounds = [length * i // count for i in range(count + 1)]
            for node, stop in pairwise(bounds):
                tiles += (index, node, stop - node)
        table = (ctypes.c_int64 * len(tiles))(*tiles)
        self._kept.append(table)
        self.blocks = len(rows)  # number of blocks
        self.tiles = len(tiles) // 3  # number of tiles
        self.block = ctypes.addressof(rows)  # address of `QueryBlock [blocks]`
        self.tile = ctypes.addressof(table)  # address of the tiles, int64 `[tiles, 3]`

    @classmethod
    def of(cls, plan: TreePlan, group: int) -> NativeTables:
        """Return the tables, made once for each plan."""
        if group not in plan.native:
            plan.native[group] = cls(plan, group)
        return plan.native[group]


def _fill_tree(entry: ctypes.Structure, block: QueryBlock) -> ctypes.Array[ctypes.c_int32]:
    """Set the depths and root-first paths of a tree in ``entry``; returns their memory."""
    assert block.parents is not None
    paths: list[list[int]] = []
    for node, parent in enumerate(block.parents):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    starts = [0, *accumulate(map(len, paths))]
    numbers = [*block.depths, *starts, *chain.from_iterable(paths)]
    table = (ctypes.c_int32 * len(numbers))(*numbers)
    entry.depths = ctypes.addressof(table)
    entry.path_starts = entry.depths + 4 * len(paths)
    entry.paths = entry.path_starts + 4 * len(starts)
    return table


def _check(program: Program) -> None:
    """Refuse what the compiled code cannot run: parts of vectors, large heads."""
    dim, any_width = program.heads.dim, {0}  # logits, and scores and routes of experts
    for op in program.operations:
        if op.kind == Kind.CONVOLVE:
            any_width.add(op.delta)
        if op.kind == Kind.SIGMOID_GATE and program.buffers[op.delta].width == 1:
            any_width.add(op.delta)
        if op.kind == Kind.ROUTE:
            any_width |= {op.source, op.out}
        if op.rule is not None:
            any_width.add(op.source)
    rules = [op.rule.shape for op in program.operations if op.rule is not None]
    heads = {dim, *(size for shape in rules for size in (shape.key_dim, shape.value_dim))}
    widths = {b.width for index, b in enumerate(program.buffers) if index not in any_width}
    if wrong := sorted(size for size in widths | heads if size % LANES):
        raise ValueError(
            f"rows or heads have {wrong[0]} elements, expected multiples of {LANES} on a CPU"
        )
    if max(heads) > MAX_HEAD_DIM:
        raise ValueError(
            f"heads have {max(heads)} elements, expected at most {MAX_HEAD_DIM} on a CPU"
        )


class NativeProgram:
    """A program as C structures. Safe to run on several threads: each has its own memory."""

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        """Translate a program. Raises ``ValueError``: widths that the compiled code does not
        have."""
        _check(program)
        self._heads, self._layers, self._dtype = program.heads, program.layers, program.dtype
        self.numerics = program.numerics  # numerics of the program
        self.program = program  # the program
        # int64 `[operations]`, to which each run adds the time of the stages that begin with an
        # operation: the row-wise ones behind it, and what prepares rows for a product, are of the
        # same stage. Unit: nanoseconds. None: runs are not measured.
        self.nanoseconds: Tensor | None = None
        self._kept: list[Any] = []
        # Width of the first operation's rows.
        self.width = program.buffers[program.operations[0].out].width
        self._vocabulary = program.buffers[0].width
        operations = (COperation * len(program.operations))(
            *map(self._translate, program.operations)
        )
        buffers = (CBuffer * len(program.buffers))(
            *(CBuffer(b.width, b.extent) for b in program.buffers)
        )
        self._recurrent = program.recurrent
        first, selected = program.operations[0], program.operations[program.selecting :]
        self._selected_taps = {op.layer for op in selected if op.kind == Kind.TAP}
        self._selects = bool(selected)
        tapped = [op.layer for op in program.operations if op.kind == Kind.TAP]
        self._tapped = max(tapped, default=-1) + 1  # of all layers, with KV or without
        self._program = CProgram(
            operations=len(operations), selecting=program.selecting,
            operation=ctypes.addressof(operations), buffers=len(buffers),
            buffer=ctypes.addressof(buffers), vocabulary=_vocabulary(first),
            q_heads=program.heads.q_heads, kv_heads=program.heads.kv_heads, dim=program.heads.dim,
            top=program.top, products=PRODUCTS[program.numerics], scale=program.heads.factor,
            cap=program.heads.cap,
        )  # fmt: skip
        self._kept += [operations, buffers]
        self.address = ctypes.addressof(self._program)  # address of `Program` of `native/program.h`
        self._library = library
        self._memory = threading.local()

    def run(self, call: Pass) -> PassResult:
        """See :meth:`paceline.kernels.Executor.run`."""
        plan = call.plan
        states = DeltaPass(call) if self._recurrent else None
        tables = self._check_caches([cache.table for cache in call.caches], self._layers)
        self._check_blocks(plan, tables)
        blocks = NativeTables.of(plan, self._heads.q_heads // self._heads.kv_heads)
        caches = _addresses(tables)
        tokens = None if call.tokens is None else call.tokens.contiguous()
        inputs = None if call.inputs is None else call.inputs.contiguous()
        selection = None if call.selection is None else call.selection.contiguous()
        selected = plan.rows if selection is None else selection.shape[0]
        logits = torch.empty(selected if self._selects else 0, self._vocabulary)
        taps = {
            layer: torch.empty(
                selected if layer in self._selected_taps else plan.rows,
                self.width,
                dtype=self._dtype,
            )
            for layer in call.taps
        }
        kept: list[Any] = []
        queries = {
            layer: torch.empty(len(rows), self._heads.q_heads, self._heads.dim)
            for layer, rows in call.queries.items()
        }
        run = CRun(
            rows=plan.rows, selected=logits.shape[0], threads=torch.get_num_threads(),
            tokens=None if tokens is None else address(tokens, "tokens"),
            position=address(plan.positions, "positions"),
            selection=None if selection is None else address(selection, "selection"),
            table=address(call.table, "table"),
            tables=len(call.table) if call.table.dim() == 3 else 1, table_rows=call.table.shape[-2],
            sequences=len(tables), caches=ctypes.addressof(caches),
            kv_type=CACHE_TYPES.index(tables[0].dtype), blocks=blocks.blocks, block=blocks.block,
            tiles=blocks.tiles, tile=blocks.tile, logits=logits.data_ptr(),
            taps=self._tap_table(taps, kept), taps_bf16=self._dtype == torch.bfloat16,
            probes=self._probe_table(call.probes, kept),
            queries=self._query_table(call.queries, queries, kept),
        )  # fmt: skip
        if self.nanoseconds is not None:
            run.nanoseconds = address(self.nanoseconds, "nanoseconds")
        if inputs is not None:
            run.inputs, run.inputs_bf16 = address(inputs, "inputs"), inputs.dtype == torch.bfloat16
        if call.contexts:
            self._add_contexts(run, call, kept)
        if states is not None:
            state_table, committed = states.to_c()
            run.states, run.committed = ctypes.addressof(state_table), ctypes.addressof(committed)
            kept += [state_table, committed]
        at = ctypes.addressof(run)
        memory = self._reserve(self._library.paceline_program_bytes(self.address, at))
        run.memory = memory.data_ptr()
        failed = self._library.paceline_run_program(self.address, at)
        if failed == _OUT_OF_MEMORY:
            raise MemoryError(f"no memory for the scores of {plan.rows} rows: send smaller batches")
        if failed:
            raise IndexError(
                f"a token is outside of the vocabulary of {self._program.vocabulary}, or a "
                f"selected row outside of the batch of {plan.rows} rows"
            )
        if states is not None:
            states.finish()
        return PassResult(logits, taps, queries)

    def _translate(self, op: Operation) -> ctypes.Structure:
        weights: list[int | None] = [None, None, None]
        if isinstance(op.table, Tensor):
            weights[0] = address(op.table, "an embedding")
        elif op.table is not None:
            weights[1] = self._matrices([op.table])
        if op.matrices:
            weights[0] = self._matrices([matrix.packed for matrix in op.matrices])
        if op.sinks is not None:
            weights[0] = address(op.sinks, "sinks")
        if op.choice is not None:
            weights[0] = address(op.choice, "the choice of experts")
        if op.rule is not None:
            rule = op.rule.to_c()
            self._kept.append(rule)
            weights[0] = ctypes.addressof(rule)
        for index, norm in enumerate(op.norms):
            weights[index] = address(norm.weight, "a norm")
        routing = op.routing
        alike = ("delta", "out", "layer", "window", "rope", "q_rope", "gelu", "factor")
        return COperation(
            kind=CODES[op.kind.name], in_=op.source, **{name: getattr(op, name) for name in alike},
            q_heads=0 if op.heads is None else op.heads.q_heads,
            kv_heads=0 if op.heads is None else op.heads.kv_heads,
            bf16=isinstance(op.table, Tensor) and op.table.dtype == torch.bfloat16,
            whole=whole_norms(op),
            experts=len(op.matrices) if op.experts else routing.experts if routing else 0,
            among=routing is not None and routing.among,
            sigmoid=routing is not None and routing.sigmoid, weight=weights[0], second=weights[1],
            values=weights[2],
            factors=None if op.factors is None else address(op.factors, "factors"),
            eps=op.norms[0].eps if op.norms else 0.0, limit=op.limit,
        )  # fmt: skip

    def _matrices(self, packed: Sequence[PackedMatrix | None]) -> int:
        """Return the address of matrices for the kernels, which live as long as the program."""
        arguments = [matrix.matrix(self.numerics) for matrix in packed if matrix is not None]
        matrices = (CMatrix * len(packed))(*arguments)
        self._kept.append(matrices)
        return ctypes.addressof(matrices)

    def _add_contexts(self, run: ctypes.Structure, call: Pass, kept: list[Any]) -> None:
        """The contexts as caches, and each block as nodes that attend to a prefix and its end."""
        tables = self._check_caches([context.cache.table for context in call.contexts], 1)
        for context, table in zip(call.contexts, tables, strict=True):
            if not 1 <= context.length <= table.capacity:
                raise ValueError(
                    f"a context has {context.length} slots, expected 1 to {table.capacity}"
                )
        caches, plan = _addresses(tables), call.plan
        blocks = (CQueryBlock * len(plan.blocks))(
            *(
                CQueryBlock(
                    block.sequence, call.contexts[block.sequence].length - 1, 1, row, *_NODES
                )
                for block, row in zip(plan.blocks, plan.offsets, strict=False)
            )
        )
        run.contexts, run.context_block = ctypes.addressof(caches), ctypes.addressof(blocks)
        run.context_type = CACHE_TYPES.index(tables[0].dtype)
        kept += [caches, blocks]

    def _check_caches(self, tables: Sequence[LayerTable | None], layers: int) -> list[LayerTable]:
        kv_heads, dim = self._heads.kv_heads, self._heads.dim
        present = [table for table in tables if table is not None]
        for index, table in enumerate(present):
            if (table.heads, table.dim, table.dtype) != (kv_heads, dim, present[0].dtype) or (
                table.layers < layers or table.dtype not in CACHE_TYPES
            ):
                raise ValueError(
                    f"cache {index} has {table.layers} layers of {table.dtype} "
                    f"[{table.heads}, {table.capacity}, {table.dim}], expected {layers} of "
                    f"float32, bfloat16 or int8 [{kv_heads}, n, {dim}], the same type in all caches"
                )
        return present

    @staticmethod
    def _check_blocks(plan: TreePlan, tables: Sequence[LayerTable]) -> None:
        for block in plan.blocks:
            if block.sequence >= len(tables) or block.stop > tables[block.sequence].capacity:
                raise ValueError(
                    f"a query block ends at slot {block.stop} of sequence {block.sequence}, but "
                    f"there are caches of {[table.capacity for table in tables]} slots"
                )

    def _tap_table(self, taps: Mapping[int, Tensor], kept: list[Any]) -> int | None:
        if not taps:
            return None
        table = (ctypes.c_void_p * self._tapped)()
        for layer, tap in taps.items():
            table[layer] = tap.data_ptr()
        kept.append(table)
        return ctypes.addressof(table)

    def _probe_table(self, probes: Mapping[int, Sequence[Probe]], kept: list[Any]) -> int | None:
        if not probes:
            return None
        table = (CProbes * self._layers)()
        for layer, layer_probes in probes.items():
            rows = (CProbe * len(layer_probes))()
            for row, probe in zip(rows, layer_probes, strict=True):
                row.block, row.node, row.weights = probe.block, probe.node, probe.weights
                row.stride, row.out = probe.out.stride(0), address(probe.out, "a probe's output")
            table[layer] = CProbes(len(rows), ctypes.addressof(rows))
            kept.append(rows)
        kept.append(table)
        return ctypes.addressof(table)

    def _query_table(
        self, wanted: Mapping[int, Sequence[int]], out: Mapping[int, Tensor], kept: list[Any]
    ) -> int | None:
        if not wanted:
            return None
        table = (CQueries * self._layers)()
        for layer, indices in wanted.items():
            rows = (ctypes.c_int64 * len(indices))(*indices)
            table[layer] = CQueries(len(rows), ctypes.addressof(rows), out[layer].data_ptr())
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
    """Return the rows of the embedding, if a program begins with one."""
    if op.table is None:
        return 0
    return op.table.shape[0] if isinstance(op.table, Tensor) else op.table.outs


def _addresses(tables: Sequence[LayerTable]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tables))(*(table.address for table in tables))


class Executor:
    """Runs a program. Runs of several threads do not disturb each other."""

    def __init__(self, program: Program) -> None:
        """Prepare a program for all devices that its weights may be on. Raises ``ValueError`` if
        they are packed for the CPU, and the compiled kernels cannot run it."""
        self._program = program
        packed = all(matrix.packed for op in program.operations for matrix in op.matrices)
        # The program for compiled kernels, which run it where no cache is in pages.
        self.native = NativeProgram(library(), program) if packed else None

    def run(self, call: Pass) -> PassResult:
        """Run the operations; keys and values are written to the caches.

        On a CPU one native call runs them all. Raises ``IndexError``: a token or a selected row
        does not exist; ``ValueError``: the caches do not fit the plan; ``MemoryError``: memory ran
        out.
        """
        caches = (*call.caches, *(context.cache for context in call.contexts))
        if self.native is None or any(cache.table is None for cache in caches):
            return run_one_by_one(self._program, call)
        return self.native.run(call)
