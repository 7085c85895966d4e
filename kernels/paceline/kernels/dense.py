"""Attention calls, the recording of scores, and attention in plain PyTorch.

Attention scores of single rows are recorded during a call: SpecAttn (section 3.3, Collect-2-Query)
selects positions for a drafter by the scores that verification computes anyway. Recording them for
few rows is cheap and does not change the bits of the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.caches import Plane, from_rows, span
from paceline.kernels.trees import LevelBlock, QueryBlock, TreePlan, send

MAX_PROBES = 2
"""Rows of one block whose scores attention records on GPUs; those of further rows, and weights,
are recorded by another kernel there, which reads the keys again."""


@dataclass(frozen=True)
class Probe:
    """Request to record the scores of one row over the committed prefix."""

    block: int
    """Index of the block in the plan."""

    node: int
    """Index of the row in the block."""

    out: Tensor
    """float32 ``[Hkv, n]`` with a dense last dimension and n at least the block's start; for each
    prefix position, the sum over the query heads that share a kv head."""

    weights: bool = False
    """Whether to record softmax weights; else the scaled scores before the softmax, -inf for
    positions outside of a window."""


@dataclass(frozen=True)
class ProbedBlock:
    """Output buffer of a captured pass for the scores of a block in all recorded layers."""

    block: int
    """Index of the block."""

    nodes: tuple[int, ...]
    """Rows of the block."""

    out: Tensor
    """float32 ``[layers, nodes or more, Hkv, n]`` with a dense last dimension and n at least the
    block's start. The part of a row is as :attr:`Probe.out`."""

    weights: bool = False
    """Whether to record softmax weights."""

    @property
    def again(self) -> bool:
        """Whether a GPU reads the keys again for it."""
        return self.weights or len(self.nodes) > MAX_PROBES


class GraphProbes(tuple[Probe, ...]):
    """No probes: records the scores of a layer that a plan with fixed tables names."""

    layer: int
    """Index of the layer among the recorded layers."""

    def __new__(cls, layer: int) -> GraphProbes:
        """Make the probes of a layer."""
        made = super().__new__(cls)
        made.layer = layer
        return made

    def __bool__(self) -> bool:
        """There is something to record."""
        return True


@dataclass(frozen=True)
class AttentionCall:
    """Checked arguments of :func:`tree_attention`, and where the results go."""

    q: Tensor
    """Queries, ``[M, Hq, D]``."""

    keys: Sequence[Plane]
    """Keys of each sequence, ``[Hkv, capacity, D]`` or in pages."""

    values: Sequence[Plane]
    """Values, like ``keys``."""

    plan: TreePlan
    """The packed blocks."""

    scale: float
    """Factor on the scores."""

    window: int | None
    """Sliding window in tokens, or None."""

    out: Tensor
    """The attention of every row, ``[M, Hq, D]``."""

    lse: Tensor | None = None
    """Log-sum-exp of the scaled scores of every row, float32 ``[M, Hq]``; None if no probe needs
    it."""

    probes: Sequence[Probe] = ()
    """Scores to record, without an effect on the result."""

    cap: float = 0.0
    """Soft cap of the scaled scores; 0: none."""

    sinks: Tensor | None = None
    """float32 ``[Hq]``, one extra logit per head in the softmax denominator; None: none."""

    def scores(self, q: Tensor, key: Tensor) -> Tensor:
        """Scaled and capped scores of float32 queries ``[..., n, D]`` and keys ``[..., m, D]``."""
        found = torch.matmul(q, key.transpose(-1, -2)).mul_(self.scale)
        return found.div_(self.cap).tanh_().mul_(self.cap) if self.cap else found


def record_scores(call: AttentionCall, probes: Sequence[Probe]) -> None:
    """Fill probes by separate products, for backends that do not record scores."""
    q, plan, lse = call.q, call.plan, call.lse
    index, key = -1, torch.empty(0)
    for probe in probes:
        block = plan.blocks[probe.block]
        row = plan.offsets[probe.block] + probe.node
        if probe.block != index:
            index = probe.block
            key = from_rows(span(call.keys[block.sequence], 0, block.start)).float()
        heads = q[row].float().view(key.shape[0], -1, q.shape[2])
        scores = call.scores(heads, key)
        if call.window is not None:
            first = block.start + block.depths[probe.node] - call.window + 1
            scores[..., : max(0, first)] = -torch.inf
        if probe.weights:
            if lse is None:
                raise ValueError("weights cannot be recorded without the log-sum-exp of the scores")
            scores = (scores - lse[row].view(key.shape[0], -1, 1)).exp()
        probe.out[:, : block.start] = scores.sum(1)


class DenseBackend:
    """One masked softmax per block, in fp32, on any device.

    Scores are materialised: memory grows with nodes times context. On the CPU it serves what the
    compiled programs (:class:`paceline.kernels.Executor`) do not run.
    """

    name = "dense"

    def attend(self, call: AttentionCall) -> None:
        """See :class:`AttentionBackend`."""
        plan = call.plan
        for index, block in enumerate(plan.blocks):
            rows = slice(plan.offsets[index], plan.offsets[index + 1])
            key = from_rows(span(call.keys[block.sequence], 0, block.stop)).float()
            value = from_rows(span(call.values[block.sequence], 0, block.stop)).float()
            nodes, heads, dim = call.q[rows].shape
            kv_heads = key.shape[0]
            packed = call.q[rows].float().view(nodes, kv_heads, -1, dim).permute(1, 2, 0, 3)
            scores = call.scores(packed, key.unsqueeze(1))
            scores.masked_fill_(_hidden(plan, index, call.window), float("-inf"))
            total = scores.logsumexp(-1, keepdim=True)
            if call.sinks is not None:
                total = torch.logaddexp(total, call.sinks.view(kv_heads, -1, 1, 1))
            attended = torch.matmul(scores.sub_(total).exp_(), value.unsqueeze(1))
            call.out[rows] = attended.permute(2, 0, 1, 3).reshape(nodes, heads, dim)
            if call.lse is not None:
                call.lse[rows] = total[..., 0].permute(2, 0, 1).reshape(nodes, heads)
        record_scores(call, call.probes)


def _hidden(plan: TreePlan, index: int, window: int | None) -> Tensor:
    """Mask of hidden keys per node, bool ``[nodes, stop]``; computed once per plan."""
    key = (index, window)
    if key not in plan.torch.hidden:
        block = plan.blocks[index]
        found = send(~_seen(block, window), plan.device)
        if plan.ancestors is not None:
            found[:, block.start :] |= ~plan.ancestors[index]
        plan.torch.hidden[key] = found
    return plan.torch.hidden[key]


def _seen(block: QueryBlock, window: int | None) -> Tensor:
    seen = torch.ones(block.length, block.stop, dtype=torch.bool)
    if not isinstance(block, LevelBlock):
        seen[:, block.start :] = torch.from_numpy(block.ancestors())
    if window is not None:
        at = torch.tensor(block.depths) + block.start
        new = at[: block.stop - block.start]
        seen &= torch.cat([torch.arange(block.start), new])[None, :] > at[:, None] - window
    return seen
