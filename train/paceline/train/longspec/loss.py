"""Linear and cross-entropy in one: logits exist for a few rows at a time only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 256
"""Text positions whose logits exist at once, for every lag."""


class ChunkedDivergence(torch.autograd.Function):
    """KL divergence of a drafter from the target, both given before the LM head.

    Cross-entropy (LongSpec, appendix D) with the target's distribution for a label, less the
    target's own entropy, which no drafter can change. The gradient is made along with the loss,
    as in Liger's fused form, so that backward needs no logits again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, head: Tensor, weights: Tensor) -> Tensor:
        """`hidden` [lags, N, d], `target` [N, d], `head` [V, d], `weights` fp32 [lags, N] that add
        up to 1 -> fp32 scalar: the weighted mean in nats."""
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            wanted = F.linear(target[part].to(head), head).float().log_softmax(-1)
            # The target's mean row of the head: what its logits weigh, whatever the lag.
            mean = wanted.exp().to(head) @ head
            entropy = -(wanted.exp() * wanted).sum(-1)
            rows = hidden[:, part].to(head)
            logits = F.linear(rows, head).float()
            found = logits.log_softmax(-1)
            total_mass = logits[..., 0] - found[..., 0]
            agreed = (rows.float() * mean.float()).sum(-1)
            weight = weights[:, part]
            total += ((total_mass - agreed - entropy) * weight).sum()
            slope = found.exp_().to(head) @ head - mean
            gradient[:, part] = (slope * weight[..., None]).to(gradient)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None


def divergence(hidden: Tensor, target: Tensor, head: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean KL(target || drafter), see :class:`ChunkedDivergence`."""
    value: Tensor = ChunkedDivergence.apply(hidden, target, head, weights)  # type: ignore[no-untyped-call]
    return value
