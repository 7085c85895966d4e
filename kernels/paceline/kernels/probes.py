"""What rows of an attention call look at, noted while it runs.

SpecAttn (section 3.3, Collect-2-Query): the scores that verification computes anyway say which
positions matter to the tokens that come next. Noting them for few rows costs next to nothing, and
changes no bit of the attention's own result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.paged import Plane, span
from paceline.kernels.trees import TreePlan


@dataclass(frozen=True)
class Probe:
    """Asks what one row of a segment looks at in the committed prefix.

    Attributes:
        segment: Index of the segment in the plan.
        node: The row, counted inside the segment.
        out: float32 ``[Hkv, n]`` with a dense last dimension and n at least the segment's start;
            for each prefix position, the sum over the query heads that share a kv head.
        weights: Whether softmax weights are wanted; else the scaled scores before the softmax,
            -inf where a window hides the position.
    """

    segment: int
    node: int
    out: Tensor
    weights: bool = False


MOST_NOTED = 2
"""Rows of one block whose scores attention can note on its way."""


@dataclass(frozen=True)
class NotedBlock:
    """Where a captured pass notes the scores of a block, of all noted layers.

    Attributes:
        block: Index of the block.
        nodes: Rows of it, at most ``MOST_NOTED``.
        room: float32 ``[layers, nodes or more, Hkv, n]`` with a dense last dimension and n at least
            the block's start. A row's part is as :attr:`Probe.out`.
    """

    block: int
    nodes: tuple[int, ...]
    room: Tensor


class PlannedProbes(tuple[Probe, ...]):
    """No probe, but leave to note what the blocks of a plan with fixed tables want of one layer.

    Attributes:
        layer: Place of the layer among those that are noted.
    """

    layer: int

    def __new__(cls, layer: int) -> PlannedProbes:
        """Make leave for a layer."""
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
    """Fill the probes by products of their own, for backends that do not note scores themselves.

    Args:
        q: As in :func:`paceline.kernels.tree_attention`, like the others.
        keys: Per sequence.
        plan: The packed segments.
        probes: What to note.
        scale: Factor on the scores.
        window: Sliding window in tokens, or None.
        lse: Log-sum-exp of every row, ``[M, Hq]``; needed for weights.
    """
    for probe in probes:
        segment = plan.segments[probe.segment]
        row = plan.offsets[probe.segment] + probe.node
        key = span(keys[segment.sequence], 0, segment.start).float()
        heads = q[row].float().view(key.shape[0], -1, q.shape[2])
        scores = torch.matmul(heads, key.transpose(1, 2)) * scale
        if window is not None:
            first = segment.start + segment.depths[probe.node] - window + 1
            scores[..., : max(0, first)] = -torch.inf
        if probe.weights:
            if lse is None:
                raise ValueError("weights cannot be noted without the log-sum-exp of the scores")
            scores = (scores - lse[row].view(key.shape[0], -1, 1)).exp()
        probe.out[:, : segment.start] = scores.sum(1)
