"""The operations of programs: how each runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.caches import Plane
from paceline.kernels.devices import kernels_for, tree_attention
from paceline.kernels.program import Kind, Operation, Pass, PassResult, Program, Routing
from paceline.kernels.rotated import IntSums
from paceline.kernels.rows import clamped_gate, convolve_blocks, gelu_gate, normalised
from paceline.kernels.trees import ContextBlock, plan_trees, send

# Rows of a buffer. Products of integers keep their scales apart, for the kernel that reads them.
Rows = Tensor | IntSums


class OneByOne:
    """One run of a program, an operation after the other."""

    def __init__(self, program: Program, call: Pass) -> None:
        self.program, self.call = program, call
        self.kernels = kernels_for(call.plan.device).rows
        self.buffers: dict[int, Rows] = {}  # rows by the number of their buffer
        self.taps: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        # Rows of COMBINE by slot: `row * top + rank`.
        self.slots = torch.empty(0, dtype=torch.int64)
        self.chosen = torch.empty(0, dtype=torch.int64)  # experts by slot, rising

    def scaled(self, index: int) -> Tensor:
        """Return the rows of a buffer, which keeps them with their scales."""
        rows = self.buffers[index]
        if isinstance(rows, IntSums):
            self.buffers[index] = rows = rows.scaled()
        return rows


def run_one_by_one(program: Program, call: Pass) -> PassResult:
    """See :meth:`paceline.kernels.Executor.run`."""
    run = OneByOne(program, call)
    for op in program.operations:
        out = OPERATIONS[op.kind](run, op)
        if out is not None:
            run.buffers[op.out] = out
    logits = run.scaled(0) if 0 in run.buffers else torch.empty(0, 0)
    return PassResult(logits, run.taps, run.queries)


def whole_norms(op: Operation) -> bool:
    """Return whether the norms of ROTATE are over all queries and all keys together."""
    return op.heads is not None and bool(op.norms) and len(op.norms[0].weight) != op.heads.dim


def _embed(run: OneByOne, op: Operation) -> Tensor:
    tokens, table = run.call.tokens, op.table
    assert table is not None
    assert tokens is not None
    embeddings = table[tokens] if isinstance(table, Tensor) else table.rows(tokens)
    return embeddings.float() if op.factor == 1 else embeddings.float() * op.factor


def _input(run: OneByOne, op: Operation) -> Tensor:
    assert run.call.inputs is not None
    return run.call.inputs.to(run.program.dtype)


def _add_norm(run: OneByOne, op: Operation) -> Tensor:
    delta: Rows | None = None
    x = run.scaled(op.source)
    if op.delta:
        delta = run.buffers[op.delta] if op.factor == 1 else run.scaled(op.delta) * op.factor
    x = run.buffers[op.source] = x.float()
    if op.window:
        normed = run.kernels.add_norm(x.view(-1, op.window), None, op.norms[0], run.program.dtype)
        return normed.view(x.shape)
    return run.kernels.add_norm(x, delta, op.norms[0], run.program.dtype)


def _multiply(run: OneByOne, op: Operation) -> Rows:
    x = run.scaled(op.source).to(run.program.dtype)
    if op.experts is not None:
        return op.experts(x, run.chosen)
    assert op.matrix is not None
    sums = op.matrix.sums(x) if run.kernels.scale_sums else None
    return op.matrix(x) if sums is None else sums


def _rotate(run: OneByOne, op: Operation) -> Tensor:
    assert op.heads is not None
    unscaled = op.heads.kv_heads > 0 and not whole_norms(op)  # its kernel takes integers
    x = run.buffers[op.source] if unscaled else run.scaled(op.source)
    if op.q_rope != op.rope:  # the kernels have one table for both: keys are written twice
        q = _rotated(run, replace(op, rope=op.q_rope), x)
        _rotated(run, op, x)
    else:
        q = _rotated(run, op, x)
    return q if op.factors is None else q * op.factors


def _gate(run: OneByOne, op: Operation) -> Tensor:
    if op.delta:
        gates, all_ups = run.scaled(op.source), run.scaled(op.delta)
        ups = all_ups[:, op.layer * gates.shape[1] :][:, : gates.shape[1]]
        run.buffers[op.source] = torch.cat([gates, ups.to(gates.dtype)], 1)
    if op.limit:
        return clamped_gate(run.scaled(op.source), op.limit)
    if op.gelu:
        return gelu_gate(run.scaled(op.source))
    return run.kernels.gate(run.buffers[op.source])


def _sigmoid_gate(run: OneByOne, op: Operation) -> None:
    x = run.scaled(op.source)
    gates = run.scaled(op.delta)[:, -x.shape[1] :].float().sigmoid()
    run.buffers[op.source] = (x.float() * gates).to(x.dtype)


def _scale(run: OneByOne, op: Operation) -> None:
    run.buffers[op.source] = run.scaled(op.source) * op.factor


def _add(run: OneByOne, op: Operation) -> None:
    x, delta = run.scaled(op.source), run.scaled(op.delta)
    x += delta * op.factor if op.factor != 1 else delta


def _convolve(run: OneByOne, op: Operation) -> Tensor:
    assert isinstance(op.table, Tensor)
    length = run.call.plan.blocks[0].length
    source, weights = (
        run.scaled(buffer).unflatten(0, (-1, length)) for buffer in (op.source, op.delta)
    )
    return convolve_blocks(source, op.table, weights, op.layer).flatten(0, 1)


def _cap(run: OneByOne, op: Operation) -> Tensor:
    return op.factor * (run.scaled(op.out) / op.factor).tanh()


def _route(run: OneByOne, op: Operation) -> Tensor:
    assert op.routing is not None
    return _routes(run.scaled(op.source).float(), op.routing, op.choice, op.factors)


def _spread(run: OneByOne, op: Operation) -> Tensor:
    top = run.program.top
    x = run.scaled(op.source)
    chosen, run.slots = run.scaled(op.delta)[:, :top].flatten().sort(stable=True)
    run.chosen = chosen.long()
    return x[run.slots // top]


def _combine(run: OneByOne, op: Operation) -> Tensor:
    x, top = run.scaled(op.source), run.program.top
    ranked = torch.empty_like(x, dtype=torch.float32)
    ranked[run.slots] = x.float()
    shares = run.scaled(op.delta)[:, top:].unsqueeze(-1)
    total, *others = ranked.unflatten(0, (-1, top)).mul_(shares).unbind(1)
    for other in others:  # sum() has an order that depends on the number of rows
        total = total + other
    combined: Tensor = total.to(run.program.dtype)
    return combined


def _tap(run: OneByOne, op: Operation) -> None:
    x = run.scaled(op.source)
    if op.layer in run.call.taps:
        run.taps[op.layer] = x.to(run.program.dtype, copy=True)


def _select(run: OneByOne, op: Operation) -> Tensor:
    x, selection = run.scaled(op.source), run.call.selection
    return x if selection is None else x[selection]


def _routes(
    scores: Tensor, routing: Routing, choice: Tensor | None, factors: Tensor | None
) -> Tensor:
    """Return the experts of each row, then their shares: float32 ``[rows, 2 top]``."""
    parts = scores.sigmoid() if routing.sigmoid else scores.softmax(-1)
    wanted = scores if choice is None else parts + choice
    ranked, order = wanted.sort(dim=-1, descending=True, stable=True)
    chosen = order[:, : routing.top]
    if routing.sigmoid or choice is not None:
        shares = parts.gather(1, chosen)
        if routing.among:
            shares = shares / shares.sum(-1, keepdim=True).clamp(min=routing.min_sum)
    elif routing.among:
        shares = ranked[:, : routing.top].softmax(-1)
    else:
        shares = ranked.softmax(-1)[:, : routing.top]
    shares = shares * routing.factor
    shares = shares if factors is None else shares * factors[chosen]
    return torch.cat([chosen.float(), shares], dim=-1)


def _rotated(run: OneByOne, op: Operation, x: Rows) -> Tensor:
    """Return queries after RoPE; keys and values are written to the caches."""
    assert op.heads is not None
    plan, table, dim = run.call.plan, run.call.table, op.heads.dim
    table = table[op.rope] if table.dim() == 3 else table
    norms = (op.norms[0], op.norms[1]) if op.norms else None
    width = (op.heads.q_heads + 2 * op.heads.kv_heads) * dim
    missing = run.program.heads.q_heads - op.heads.q_heads  # the kernels rotate all heads together
    if len(op.norms) > 2 and op.heads.kv_heads:
        first = width - op.heads.kv_heads * dim
        x = x.scaled() if isinstance(x, IntSums) else x
        values = normalised(x[:, first:].unflatten(1, (-1, dim)).float(), op.norms[2])
        x = torch.cat([x[:, :first], values.flatten(1).to(x.dtype)], 1)
    if isinstance(x, IntSums):
        if x.shape[1] == width and not missing:
            return run.kernels.rotate(x, norms, table, plan, *_planes(run, op))
        x = x.scaled()
    if not op.heads.kv_heads:
        cos, sin = table[plan.positions].unsqueeze(1).chunk(2, dim=-1)
        queries = x.float().unflatten(1, (-1, dim))
        queries = queries if norms is None else normalised(queries, norms[0])
        low, high = queries.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    x = x[:, :width]  # without gates of outputs
    heads = pad(x, (missing * dim, 0)) if missing else x.contiguous()
    if norms is not None and whole_norms(op):
        widths = [len(norm.weight) for norm in norms]
        q, k, v = heads.split([*widths, widths[1]], dim=-1)
        parts = [
            run.kernels.add_norm(part.float().contiguous(), None, norm, torch.float32)
            for part, norm in zip((q, k), norms, strict=True)
        ]
        heads, norms = torch.cat([*(part.to(v.dtype) for part in parts), v], -1), None
    return run.kernels.rotate(heads, norms, table, plan, *_planes(run, op))


def _planes(run: OneByOne, op: Operation) -> tuple[list[Plane], list[Plane]]:
    """Return keys and values of each sequence in a layer."""
    planes = [cache.layer(op.layer) for cache in run.call.caches]
    return [k for k, _ in planes], [v for _, v in planes]


def _attend(run: OneByOne, op: Operation) -> Tensor:
    q, heads, call = run.scaled(op.source), run.program.heads, run.call
    if op.layer in call.queries:
        rows = send(torch.tensor(call.queries[op.layer]), q.device)
        run.queries[op.layer] = q.index_select(0, rows)  # of the last layer that shares the caches
    keys, values = _planes(run, op)
    out = torch.empty(q.shape, dtype=run.program.dtype, device=q.device)
    tree_attention(
        q, keys, values, call.plan,
        scale=heads.factor, cap=heads.cap, window=op.window or None, out=out,
        probes=call.probes.get(op.layer, ()), sinks=op.sinks,
    )  # fmt: skip
    return out.flatten(1)


def _attend_context(run: OneByOne, op: Operation) -> Tensor:
    """Return the attention of all rows of a block to the same keys."""
    q, heads, call = run.scaled(op.source), run.program.heads, run.call
    keys, values = zip(*(context.cache.layer(op.layer) for context in call.contexts), strict=True)
    plan = call.plan.contexts
    if plan is None:  # for all layers
        blocks = [
            ContextBlock(
                block.sequence, call.contexts[block.sequence].length - 1, None, block.length
            )
            for block in call.plan.blocks
        ]
        plan = call.plan.contexts = plan_trees(blocks, device=call.plan.device)
    attended = tree_attention(
        q, keys, values, plan,
        scale=heads.factor, cap=heads.cap, window=op.window or None,
    )  # fmt: skip
    return attended.flatten(1).to(run.program.dtype)


# How each kind runs on a GPU, which has no DELTA: returns the rows of buffer `op.out`, if any.
OPERATIONS: dict[Kind, Callable[[OneByOne, Operation], Rows | None]] = {
    Kind.EMBED: _embed,
    Kind.INPUT: _input,
    Kind.ADD_NORM: _add_norm,
    Kind.MULTIPLY: _multiply,
    Kind.ROTATE: _rotate,
    Kind.ATTEND: _attend,
    Kind.ATTEND_CONTEXT: _attend_context,
    Kind.GATE: _gate,
    Kind.ADD: _add,
    Kind.TAP: _tap,
    Kind.SELECT: _select,
    Kind.CAP: _cap,
    Kind.ROUTE: _route,
    Kind.SPREAD: _spread,
    Kind.COMBINE: _combine,
    Kind.CONVOLVE: _convolve,
    Kind.SIGMOID_GATE: _sigmoid_gate,
    Kind.SCALE: _scale,
}
