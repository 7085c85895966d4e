"""Calls of tree attention, and the recording of scores.

Tree attention after LongSpec (section 3.3): unmasked attention over the committed prefix, masked
attention over the block of new nodes, merged by log-sum-exp. Chunks of keys begin at fixed
positions, so the operations of a row depend on its own path alone, and its bits do not depend on
the rest of the batch.

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
from paceline.kernels.trees import TreePlan

# Rows of one block whose scores attention records on GPUs; scores of further rows, and weights, are
# recorded by another kernel there, which reads the keys again.
MAX_PROBES = 2


@dataclass(frozen=True)
class Probe:
    """Request to record the scores of one row over the committed prefix."""

    block: int  # index of the block in the plan
    node: int  # index of the row in the block
    # float32 `[Hkv, n]` with a dense last dimension and n at least the block's start; for each
    # prefix position, the sum over the query heads that share a kv head.
    out: Tensor
    # Whether to record softmax weights; else the scaled scores before the softmax, -inf for
    # positions outside of a window.
    weights: bool = False


@dataclass(frozen=True)
class ProbedBlock:
    """Output buffer of a captured pass for the scores of a block in all recorded layers."""

    block: int  # index of the block
    nodes: tuple[int, ...]  # rows of the block
    # float32 `[layers, nodes or more, Hkv, n]` with a dense last dimension and n at least the
    # block's start. The part of a row is as `Probe.out`.
    out: Tensor
    weights: bool = False  # whether to record softmax weights

    @property
    def again(self) -> bool:
        """Whether a GPU reads the keys again for it."""
        return self.weights or len(self.nodes) > MAX_PROBES


class GraphProbes(tuple[Probe, ...]):
    """No probes: records the scores of a layer that a plan with fixed tables names."""

    layer: int  # index of the layer among the recorded layers

    def __new__(cls, layer: int) -> GraphProbes:
        made = super().__new__(cls)
        made.layer = layer
        return made

    def __bool__(self) -> bool:
        """There is something to record."""
        return True


@dataclass(frozen=True)
class AttentionCall:
    """Checked arguments of :func:`paceline.kernels.tree_attention`, and where the results go."""

    q: Tensor  # queries, `[M, Hq, D]`
    keys: Sequence[Plane]  # keys of each sequence, `[Hkv, capacity, D]` or in pages
    values: Sequence[Plane]  # values, like `keys`
    plan: TreePlan  # the packed blocks
    scale: float  # factor on the scores
    window: int | None  # sliding window in tokens, or None
    out: Tensor  # the attention of every row, `[M, Hq, D]`
    # Log-sum-exp of the scaled scores of every row, float32 `[M, Hq]`; None if no probe needs it.
    lse: Tensor | None = None
    probes: Sequence[Probe] = ()  # scores to record, without an effect on the result
    cap: float = 0.0  # soft cap of the scaled scores; 0: none
    # float32 `[Hq]`, one extra logit per head in the softmax denominator; None: none.
    sinks: Tensor | None = None

    def scores(self, q: Tensor, key: Tensor) -> Tensor:
        """Return scaled, capped scores of float32 queries ``[..., n, D]``, keys ``[..., m, D]``."""
        scores = torch.matmul(q, key.transpose(-1, -2)).mul_(self.scale)
        return scores.div_(self.cap).tanh_().mul_(self.cap) if self.cap else scores


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
