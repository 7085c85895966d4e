"""Runs a program one operation at a time, by the kernels of the device or torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.attention import tree_attention
from paceline.kernels.program import Kind, Operation, Pass, PassResult, Program
from paceline.kernels.rows import row_kernels
from paceline.kernels.trees import TreeSegment, plan_trees


def run_one_by_one(program: Program, call: Pass) -> PassResult:
    """See :meth:`paceline.kernels.Executor.run`."""
    kernels = row_kernels(call.plan.device)
    buffers: dict[int, Tensor] = {}
    taps: dict[int, Tensor] = {}
    queries: dict[int, Tensor] = {}
    for op in program.operations:
        x = buffers[op.source] if op.source else torch.empty(0)
        match op.kind:
            case Kind.EMBED:
                assert op.table is not None
                assert call.tokens is not None
                table = op.table
                found = table[call.tokens] if isinstance(table, Tensor) else table.rows(call.tokens)
                buffers[op.out] = found.float()
            case Kind.INPUT:
                assert call.inputs is not None
                buffers[op.out] = call.inputs.to(program.dtype)
            case Kind.ADD_NORM:
                delta = buffers.get(op.delta)
                x = buffers[op.source] = x.float()
                buffers[op.out] = kernels.add_norm(x, delta, op.norms[0], program.dtype)
            case Kind.MULTIPLY:
                assert op.matrix is not None
                buffers[op.out] = op.matrix(x.to(program.dtype))
            case Kind.ROTATE:
                q = _rotate(program, op, call, x)
                if op.layer in call.queries:
                    rows = torch.tensor(call.queries[op.layer], device=q.device)
                    queries[op.layer] = q.index_select(0, rows)
                buffers[op.out] = q
            case Kind.ATTEND:
                buffers[op.out] = _attend(program, op, call, x)
            case Kind.ATTEND_CONTEXT:
                buffers[op.out] = _attend_context(program, op, call, x)
            case Kind.GATE:
                buffers[op.out] = kernels.gate(x)
            case Kind.ADD:
                x += buffers[op.delta]
            case Kind.TAP:
                if op.layer in call.taps:
                    taps[op.layer] = x.to(program.dtype, copy=True)
            case Kind.SELECT:
                buffers[op.out] = x if call.selection is None else x[call.selection]
    return PassResult(buffers.get(0, torch.empty(0, 0)), taps, queries)


def _rotate(program: Program, op: Operation, call: Pass, x: Tensor) -> Tensor:
    assert op.heads is not None
    dim = op.heads.dim
    if not op.heads.kv_heads:
        cos, sin = call.table[call.plan.positions].unsqueeze(1).chunk(2, dim=-1)
        low, high = x.float().unflatten(1, (-1, dim)).chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    missing = program.heads.q_heads - op.heads.q_heads  # the kernels rotate all heads together
    norms = (op.norms[0], op.norms[1]) if op.norms else None
    keys, values = zip(*(each.layer(op.layer) for each in call.caches), strict=True)
    heads = pad(x, (missing * dim, 0))
    return row_kernels(x.device).rotate(heads, norms, call.table, call.plan, keys, values)


def _attend(program: Program, op: Operation, call: Pass, q: Tensor) -> Tensor:
    keys, values = zip(*(each.layer(op.layer) for each in call.caches), strict=True)
    out = torch.zeros(q.shape, dtype=program.dtype, device=q.device)
    tree_attention(
        q, keys, values, call.plan,
        scale=program.heads.dim**-0.5, window=op.window or None, out=out,
        probes=call.probes.get(op.layer, ()),
    )  # fmt: skip
    return out.flatten(1)


def _attend_context(program: Program, op: Operation, call: Pass, q: Tensor) -> Tensor:
    """Attention of all rows of a block to the same keys.

    They are passed as query heads of one row at the end of the context: keys are read once for all
    of them. Blocks of one length share a call.
    """
    plan, kv_heads, dim = call.plan, program.heads.kv_heads, program.heads.dim
    pairs = [context.cache.layer(op.layer) for context in call.contexts]
    keys, values = [keys for keys, _ in pairs], [values for _, values in pairs]
    out = torch.empty(plan.rows, program.heads.q_heads * dim, dtype=program.dtype, device=q.device)
    for length in {segment.length for segment in plan.segments}:
        blocks = [i for i, segment in enumerate(plan.segments) if segment.length == length]
        of = [plan.segments[i].sequence for i in blocks]
        rows = torch.tensor([plan.offsets[i] for i in blocks], device=q.device)
        rows = (rows[:, None] + torch.arange(length, device=q.device)).flatten()
        ends = plan_trees(
            [TreeSegment(i, call.contexts[i].length - 1, None, 1) for i in of], device=plan.device
        )
        packed = q[rows].view(len(blocks), length, kv_heads, -1, dim).transpose(1, 2)
        attended = tree_attention(
            packed.reshape(len(blocks), -1, dim), keys, values, ends,
            scale=dim**-0.5, window=op.window or None,
        )  # fmt: skip
        attended = attended.view(len(blocks), kv_heads, length, -1, dim).transpose(1, 2)
        out[rows] = attended.reshape(len(rows), -1).to(program.dtype)
    return out
