"""Programs one operation after the other, DELTA included, which GPUs do not have."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from paceline.kernels import Delta, Pass, Program, QueryBlock, operations
from paceline.kernels.delta import DeltaPass, _Step
from paceline.kernels.operations import OneByOne
from paceline.kernels.program import Kind, Operation, PassResult
from paceline.kernels.rows import normalised


def run_one_by_one(program: Program, call: Pass) -> PassResult:
    if not program.recurrent:
        return operations.run_one_by_one(program, call)
    states = DeltaPass(call)
    with mock.patch.dict(operations.OPERATIONS, {Kind.DELTA: partial(_delta, states)}):
        result = operations.run_one_by_one(program, call)
    states.finish()
    return result


def _delta(states: DeltaPass, run: OneByOne, op: Operation) -> Tensor:
    """The outputs of a layer, float32 ``[M, Hv Dv]``, row by row."""
    assert op.rule is not None
    x, plan = run.scaled(op.source), run.call.plan
    out = torch.empty(len(x), op.rule.shape.values)
    rows = zip(plan.blocks, plan.offsets, states.committed, strict=False)
    for block, row, committed in rows:
        step = states.steps[block.sequence]
        assert step is not None
        part = slice(row, row + block.length)
        out[part] = _run_block(op.rule, op.layer, step, block, committed, x[part].float())
    return out.to(run.program.dtype)


def _run_block(
    delta: Delta, layer: int, step: _Step, block: QueryBlock, committed: int, x: Tensor
) -> Tensor:
    shape, taps = delta.shape, delta.shape.taps
    begins = block.start == step.start
    source, replayed = (step.source, step.replayed) if begins else (step.target, 0)
    logged = x[:, : shape.logged]
    before = source.log[layer, :replayed]
    channels = torch.cat(
        [source.window[layer], before[:, : shape.channels], logged[:, : shape.channels]]
    )
    scalars = torch.cat([before[:, shape.channels :], logged[:, shape.channels :]])
    state, states, outs = source.state[layer], dict[int, Tensor](), []
    for n in range(-replayed, block.length):
        path, at = [], n
        for _ in range(taps):
            path.append(taps - 1 + replayed + at)
            at = block.parents[at] if block.parents is not None and at > 0 else at - 1
        read = channels[path[::-1]]
        if not shape.key_dim:
            factors, values = read.chunk(2, 1)
            if n >= 0:
                outs.append((factors * values * delta.convolution).sum(0))
            continue
        mixed = silu((read * delta.convolution).sum(0))
        if n >= committed:
            parent = n - 1 if block.parents is None else block.parents[n]
            after, read = _token(delta, states.get(parent, state), mixed, scalars[replayed + n])
            states[n] = after
        else:
            state, read = _token(delta, state, mixed, scalars[replayed + n])
        if n >= 0:
            outs.append(read)
    end = replayed + committed
    step.target.state[layer] = state
    step.target.window[layer] = channels[end : end + taps - 1].clone()
    step.target.log[layer, : block.length - committed] = logged[committed:]
    gates = x[:, shape.logged :]
    if delta.norm is None:
        return torch.stack(outs) * gates
    gates = silu(gates.unflatten(1, (shape.value_heads, -1)))
    return (normalised(torch.stack(outs), delta.norm) * gates).flatten(1)


def _token(delta: Delta, state: Tensor, mixed: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
    """The state ``[Hv, Dk, Dv]`` behind a token, and its output ``[Hv, Dv]``."""
    shape = delta.shape
    keys = shape.key_heads * shape.key_dim
    q, k, v = mixed.split([keys, keys, shape.value_heads * shape.value_dim])
    group = shape.value_heads // shape.key_heads
    q, k = (_unit(part.view(shape.key_heads, -1)).repeat_interleave(group, 0) for part in (q, k))
    assert delta.rates is not None
    beta, decay = scalars.chunk(2)
    decay = torch.exp(-delta.rates * softplus(decay + delta.bias))[:, None, None]
    state = state * decay
    wrong = v.view(shape.value_heads, -1) - (state * k[:, :, None]).sum(1)
    state = state + k[:, :, None] * (wrong * (delta.beta * beta.sigmoid())[:, None])[:, None, :]
    return state, (state * (q * shape.key_dim**-0.5)[:, :, None]).sum(1)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
