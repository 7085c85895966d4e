"""Attention scores of single rows, recorded during an attention call.

SpecAttn (section 3.3, Collect-2-Query) selects positions for a drafter by the attention scores that
verification computes anyway. Recording them for few rows is cheap and does not change the bits of
the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cache_rows import from_rows
from paceline.kernels.paged import Plane, span
from paceline.kernels.trees import TreePlan


@dataclass(frozen=True)
class Probe:
    """Request to record the scores of one row over the committed prefix.

    Attributes:
        segment: Index of the segment in the plan.
        node: Index of the row in the segment.
        out: float32 ``[Hkv, n]`` with a dense last dimension and n at least the segment's start;
            for each prefix position, the sum over the query heads that share a kv head.
        weights: Whether to record softmax weights; else the scaled scores before the softmax,
            -inf for positions outside of a window.
    """

    segment: int
    node: int
    out: Tensor
    weights: bool = False


MOST_NOTED = 2
"""Rows of one block whose scores the attention kernel can record."""


@dataclass(frozen=True)
class NotedBlock:
    """Output buffer of a captured pass for the scores of a block in all recorded layers.

    Attributes:
        block: Index of the block.
        nodes: Rows of it, at most ``MOST_NOTED``.
        out: float32 ``[layers, nodes or more, Hkv, n]`` with a dense last dimension and n at least
            the block's start. The part of a row is as :attr:`Probe.out`.
    """

    block: int
    nodes: tuple[int, ...]
    out: Tensor


class PlannedProbes(tuple[Probe, ...]):
    """No probes: records the scores of a layer that a plan with fixed tables names.

    Attributes:
        layer: Index of the layer among the recorded layers.
    """

    layer: int

    def __new__(cls, layer: int) -> PlannedProbes:
        """Make the probes of a layer."""
        made = super().__new__(cls)
        made.layer = layer
        return made


def note_scores(
    q: Tensor,
    keys: Sequence[Plane],
    plan: TreePlan,
    probes: Sequence[Probe],
    *,
    scale: float,
    window: int | None,
    lse: Tensor | None,
) -> None:
    """Fill the probes by separate products, for backends that do not record scores.

    Args:
        q: As in :func:`paceline.kernels.tree_attention`, like the others.
        keys: Per sequence.
        plan: The packed segments.
        probes: Scores to record.
        scale: Factor on the scores.
        window: Sliding window in tokens, or None.
        lse: Log-sum-exp of every row, ``[M, Hq]``; needed for weights.
    """
    for probe in probes:
        segment = plan.segments[probe.segment]
        row = plan.offsets[probe.segment] + probe.node
        key = from_rows(span(keys[segment.sequence], 0, segment.start)).float()
        heads = q[row].float().view(key.shape[0], -1, q.shape[2])
        scores = torch.matmul(heads, key.transpose(1, 2)) * scale
        if window is not None:
            first = segment.start + segment.depths[probe.node] - window + 1
            scores[..., : max(0, first)] = -torch.inf
        if probe.weights:
            if lse is None:
                raise ValueError("weights cannot be recorded without the log-sum-exp of the scores")
            scores = (scores - lse[row].view(key.shape[0], -1, 1)).exp()
        probe.out[:, : segment.start] = scores.sum(1)
