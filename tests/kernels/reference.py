"""Simple, slow float64 tree attention, as a reference for tests of the backends."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.caches import from_rows
from paceline.kernels.trees import TreePlan


def reference_attention(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], plan: TreePlan, *, scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result of :func:`paceline.kernels.tree_attention`, computed row by row in float64.

    Returns:
        Attention float64 ``[M, Hq, D]`` and log-sum-exp float64 ``[M, Hq]``.
    """
    heads = q.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for block, first_row in zip(plan.blocks, plan.offsets, strict=False):
        key = from_rows(keys[block.sequence]).double()
        value = from_rows(values[block.sequence]).double()
        group = heads // key.shape[0]
        for node in range(block.length):
            path = [node]
            while True:
                above = path[-1] - 1 if block.parents is None else block.parents[path[-1]]
                if above < 0:
                    break
                path.append(above)
            slots = list(range(block.start)) + [block.start + n for n in reversed(path)]
            if window is not None:
                slots = slots[-window:]  # a path has one slot per position
            for head in range(heads):
                k = key[head // group, slots]
                scores = k @ q[first_row + node, head].double() * scale
                lse[first_row + node, head] = scores.logsumexp(0)
                out[first_row + node, head] = scores.softmax(0) @ value[head // group, slots]
    return out, lse
