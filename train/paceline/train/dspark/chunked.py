"""The loss of drafted tokens without logits of all positions at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.train.dspark.preset import DSparkPreset

CHUNK = 256
"""Positions whose logits exist at once."""


class ChunkedBlockLoss(torch.autograd.Function):
    """Cross-entropy and distance of P positions, given before the LM head.

    The gradient is computed in the forward pass, so that backward needs no logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        features: Tensor | None,
        markov: Tensor | None,
        states: Tensor,
        head: Tensor,
        weights: Tensor,
        preset: DSparkPreset,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss.

        Args:
            ctx: Of autograd.
            hidden: The drafter's hidden states, fp32 `[P, d]`.
            features: Of its sequential head, fp32 `[P, r]`, or None.
            markov: W2 of that head, fp32 `[R, r]`, or None.
            states: The target's hidden states, fp32 `[P, d]`.
            head: LM head, fp32 `[R, d]`.
            weights: Of the positions, fp32 `[P]`.
            preset: Weights of the two losses.

        Returns:
            The weighted sum, and the distance of each position `[P]`, which has no gradient.
        """
        if features is None or markov is None:  # a head of rank 0
            features, markov = hidden[:, :0], head[:, :0]
        to_hidden, to_features = torch.empty_like(hidden), torch.empty_like(features)
        to_markov, distances = torch.zeros_like(markov), torch.empty_like(weights)
        total = weights.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            weight = weights[part, None]
            logits = F.linear(hidden[part], head).addmm_(features[part], markov.T)
            drafted = logits.log_softmax(-1)
            wanted = F.linear(states[part], head).softmax(-1)
            entropy = -(wanted * drafted).sum(-1)
            drafted = drafted.exp_()
            slope = drafted - wanted  # of the entropy by the logits
            distance = slope.abs().sum(-1)
            total += ((preset.ce * entropy + preset.tv * distance) * weights[part]).sum()
            distances[part] = distance
            # Of the distance: softmax' times its slope by the probabilities, sign(p - q).
            signs = slope.sign().mul_(drafted)
            signs.addcmul_(drafted, signs.sum(-1, keepdim=True), value=-1)
            slope.mul_(preset.ce).add_(signs, alpha=preset.tv).mul_(weight)
            to_hidden[part] = slope @ head
            to_features[part] = slope @ markov
            to_markov.addmm_(slope.T, features[part])
        ctx.save_for_backward(to_hidden, to_features, to_markov)
        ctx.mark_non_differentiable(distances)
        return total, distances

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            each * outer[0] if wanted else None
            for each, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return (*gradients, None, None, None, None)


def block_loss(
    hidden: Tensor,
    features: Tensor | None,
    markov: Tensor | None,
    states: Tensor,
    head: Tensor,
    weights: Tensor,
    preset: DSparkPreset,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and distance of drafted tokens, see :class:`ChunkedBlockLoss`."""
    given = (hidden, features, markov, states, head, weights, preset)
    total, distances = ChunkedBlockLoss.apply(*given)  # type: ignore[no-untyped-call]
    return total, distances
