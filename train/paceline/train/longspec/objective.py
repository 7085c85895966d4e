"""The loss of a LongSpec step: anchor-offset indices, lags, and the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.train.batches import Batches
from paceline.train.longspec.indices import SINKS, offset_positions
from paceline.train.longspec.loss import divergence
from paceline.train.longspec.preset import LongSpecPreset, StagePlan
from paceline.train.longspec.target import FrozenTarget


class LaggedLoss:
    """The :data:`~paceline.train.loop.Loss` of a run.

    Offsets and lags are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self, target: FrozenTarget, batches: Batches, preset: LongSpecPreset, plan: StagePlan
    ) -> None:
        self._target, self._batches, self._preset, self._plan = target, batches, preset, plan

    def __call__(self, forward: nn.Module, places: Tensor, done: float) -> Tensor:
        target, preset = self._target, self._preset
        stage, _ = self._plan.stage(done)
        head = target.head
        tokens = self._batches.stream[places[:, :-1]].to(head.device)
        rows, length = tokens.shape
        shifted = stage.offset and preset.offset
        if shifted:
            positions = offset_positions(rows, length, target.context).to(head.device)
        else:
            positions = torch.arange(length, device=head.device).expand(rows, length)
        hidden, keys, values = target.read(tokens, positions)
        lags = self._draw_lags()
        sinks = SINKS if shifted else 0
        found = forward(target.embed(tokens).float(), positions, keys, values, lags, sinks)
        weights = self._weights(lags, sinks, rows, length).to(head.device)
        return divergence(found.flatten(1, 2), hidden.flatten(0, 1), head, weights)

    def _draw_lags(self) -> list[int]:
        trained = self._preset.trained_lags
        drawn = torch.randperm(len(trained))[: self._preset.lags]
        return sorted(trained[i] for i in drawn.tolist())

    def _weights(self, lags: list[int], sinks: int, rows: int, length: int) -> Tensor:
        """fp32 [lags, rows * length], 0 where a token sees nothing of the target yet."""
        weights = torch.zeros(len(lags), rows, length)
        for number, lag in enumerate(lags):
            weights[number, :, max(lag, sinks) :] = self._preset.lag_decay ** (lag - 1)
        return (weights / weights.sum()).flatten(1)
