"""Runs a program one operation at a time, by the kernels of the device or torch."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.attention import tree_attention
from paceline.kernels.program import Kind, Operation, Pass, PassResult, Program
from paceline.kernels.rows import row_kernels


def run_one_by_one(program: Program, call: Pass) -> PassResult:
    """See :meth:`paceline.kernels.Executor.run`."""
    kernels, plan = row_kernels(call.plan.device), call.plan
    buffers: dict[int, Tensor] = {}
    taps: dict[int, Tensor] = {}
    queries: dict[int, Tensor] = {}
    for op in program.operations:
        x = buffers.get(op.source, call.tokens)
        match op.kind:
            case Kind.EMBED:
                assert op.table is not None
                buffers[op.out] = op.table[x].float()
            case Kind.ADD_NORM:
                delta = buffers.get(op.delta)
                buffers[op.out] = kernels.add_norm(x, delta, op.norms[0], program.dtype)
            case Kind.MULTIPLY:
                assert op.matrix is not None
                buffers[op.out] = op.matrix(x)
            case Kind.ROTATE:
                norms = (op.norms[0], op.norms[1]) if op.norms else None
                keys, values = zip(*(each.layer(op.layer) for each in call.caches), strict=True)
                q = kernels.rotate(x, norms, call.table, plan, keys, values)
                if op.layer in call.queries:
                    rows = torch.tensor(call.queries[op.layer], device=q.device)
                    queries[op.layer] = q.index_select(0, rows)
                buffers[op.out] = q
            case Kind.ATTEND:
                buffers[op.out] = _attend(program, op, call, x)
            case Kind.GATE:
                buffers[op.out] = kernels.gate(x)
            case Kind.ADD:
                x += buffers[op.delta]
            case Kind.TAP:
                if op.layer in call.taps:
                    taps[op.layer] = x.to(program.dtype, copy=True)
            case Kind.SELECT:
                buffers[op.out] = x if call.selection is None else x[call.selection]
    return PassResult(buffers[0], taps, queries)


def _attend(program: Program, op: Operation, call: Pass, q: Tensor) -> Tensor:
    keys, values = zip(*(each.layer(op.layer) for each in call.caches), strict=True)
    out = torch.zeros(q.shape, dtype=program.dtype, device=q.device)
    tree_attention(
        q, keys, values, call.plan,
        scale=program.heads.dim**-0.5, window=op.window or None, out=out,
        probes=call.probes.get(op.layer, ()),
    )  # fmt: skip
    return out.flatten(1)
