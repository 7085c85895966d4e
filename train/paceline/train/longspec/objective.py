"""The loss of a LongSpec step: anchor-offset indices, lags, and the target's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.train.batches import Batches
from paceline.train.longspec.preset import LongSpecPreset
from paceline.train.longspec.target import FrozenTarget
from paceline.train.schedule import Plan

SINKS = 4
"""Positions that anchor-offset indices do not move: attention sinks."""

CHUNK = 256
"""Text positions whose logits exist at once, for every lag."""


class LaggedLoss:
    """The :data:`~paceline.train.loop.Loss` of a run.

    Offsets and lags are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self, target: FrozenTarget, batches: Batches, preset: LongSpecPreset, plan: Plan
    ) -> None:
        self._target, self._batches, self._preset, self._plan = target, batches, preset, plan

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        target, preset = self._target, self._preset
        stage, _ = self._plan.stage(done)
        head = target.head
        tokens = self._batches.stream[indices[:, :-1]].to(head.device)
        rows, length = tokens.shape
        shifted = stage.offset and preset.offset
        if shifted:
            positions = offset_positions(rows, length, target.context).to(head.device)
        else:
            positions = torch.arange(length, device=head.device).expand(rows, length)
        hidden, keys, values = target.read(tokens, positions)
        lags = draw_lags(preset)
        sinks = SINKS if shifted else 0
        found = forward(target.embed(tokens).float(), positions, keys, values, lags, sinks)
        weights = self._weights(lags, sinks, rows, length).to(head.device)
        return divergence(found.flatten(1, 2), hidden.flatten(0, 1), head, weights)

    def _weights(self, lags: list[int], sinks: int, rows: int, length: int) -> Tensor:
        """fp32 [lags, rows * length], 0 for tokens that attend to no position of the target."""
        weights = torch.zeros(len(lags), rows, length)
        for number, lag in enumerate(lags):
            weights[number, :, max(lag, sinks) :] = self._preset.lag_decay ** (lag - 1)
        return (weights / weights.sum()).flatten(1)


def draw_lags(preset: LongSpecPreset) -> list[int]:
    """The lags of a step, rising, from torch's global generator."""
    trained = preset.trained_lags
    drawn = torch.randperm(len(trained))[: preset.lags]
    return sorted(trained[i] for i in drawn.tolist())


def offset_positions(rows: int, length: int, context: int) -> Tensor:
    """Anchor-offset indices of short texts (LongSpec, section 3.2 and algorithm 1).

    The first four positions are 0 to 3. The others are consecutive from a random offset on, drawn
    for each row from torch's global generator, so that the last is at most `context` - 1.

    Returns int64 [rows, length]. Raises ValueError if `length` exceeds `context`.
    """
    if length > context:
        raise ValueError(f"a row of {length} tokens does not fit a context of {context}")
    positions = torch.arange(length).repeat(rows, 1)
    offsets = torch.randint(0, context - length + 1, (rows, 1))
    positions[:, SINKS:] += offsets
    return positions


class ChunkedDivergence(torch.autograd.Function):
    """KL divergence of a drafter from the target, both given before the LM head.

    Cross-entropy (LongSpec, appendix D) with the target's distribution as label, minus the entropy
    of that distribution. Logits exist for `CHUNK` positions at a time; the gradient is computed in
    the forward pass, as in Liger's fused linear cross-entropy, so backward needs no logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, head: Tensor, weights: Tensor) -> Tensor:
        """`hidden` [lags, N, d], `target` [N, d], `head` [V, d], `weights` fp32 [lags, N] that add
        up to 1 -> fp32 scalar: the weighted mean in nats."""
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            target_log = F.linear(target[part].to(head), head).float().log_softmax(-1)
            # Rows of the head, averaged by the target's probabilities: the same for every lag.
            mean = target_log.exp().to(head) @ head
            entropy = -(target_log.exp() * target_log).sum(-1)
            rows = hidden[:, part].to(head)
            logits = F.linear(rows, head).float()
            draft_log = logits.log_softmax(-1)
            log_sum_exp = logits[..., 0] - draft_log[..., 0]
            expected_logit = (rows.float() * mean.float()).sum(-1)
            weight = weights[:, part]
            total += ((log_sum_exp - expected_logit - entropy) * weight).sum()
            slope = draft_log.exp_().to(head) @ head - mean
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
