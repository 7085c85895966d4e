"""The loss of a LongSpec step on stored signals of a target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.drafter.methods.longspec import LongSpecModel
from paceline.train.longspec.objective import divergence, draw_lags
from paceline.train.longspec.preset import LongSpecPreset
from paceline.train.signals import Signals
from paceline.train.whole_texts import PADDING


class SignalLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over whole texts.

    KL divergence between the distributions over the drafted tokens. A position counts if its next
    token is one of them (EAGLE-3 trains likewise).
    """

    def __init__(
        self, model: LongSpecModel, vocabulary: Tensor, head: Tensor, signals: Signals,
        preset: LongSpecPreset,
    ) -> None:  # fmt: skip
        """Train `model`; `vocabulary` and `head` are the target's embedding and LM head."""
        self._embedding, self._head = vocabulary, model.draft_head(head)
        self._signals, self._preset = signals, preset
        drafted = torch.zeros(len(vocabulary), dtype=torch.bool)
        drafted[slice(None) if model.d2t is None else model.d2t] = True
        self._counts = drafted[signals.tokens].roll(-1)
        self._counts[torch.tensor(signals.starts[1:]) - 1] = False  # no next token

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        signals, preset = self._signals, self._preset
        real = indices != PADDING
        indices = indices.clamp(min=0)
        assert signals.kv is not None
        keys, values = signals.kv[indices].permute(2, 0, 3, 1, 4).contiguous()
        embedded = self._embedding[signals.tokens[indices]].float()
        positions = torch.arange(indices.shape[1]).expand(indices.shape)
        lags = draw_lags(preset)
        weights = torch.zeros(len(lags), *indices.shape)
        for number, lag in enumerate(lags):
            counted = (real & self._counts[indices])[:, lag:]
            weights[number, :, lag:] = counted * preset.lag_decay ** (lag - 1)
        weights = (weights / weights.sum()).flatten(1)
        found = forward(embedded, positions, keys, values, lags, 0)
        hidden = signals.hidden[indices].flatten(0, 1)
        return divergence(found.flatten(1, 2), hidden, self._head, weights)
