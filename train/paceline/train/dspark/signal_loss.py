"""The loss of a DSpark step on stored signals of a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.drafter.methods.dspark import DSparkModel
from paceline.train.dspark.blocks import Blocks
from paceline.train.dspark.chunked import block_loss
from paceline.train.dspark.objective import confidence_loss, label_weights
from paceline.train.dspark.preset import DSparkPreset
from paceline.train.signals import Signals
from paceline.train.whole_texts import PADDING


class SignalBlockLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over answers.

    Both distributions are over the drafted tokens. Blocks begin anywhere in an answer, and are
    drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self, model: DSparkModel, vocabulary: Tensor, head: Tensor, signals: Signals,
        answers: Sequence[int], preset: DSparkPreset,
    ) -> None:  # fmt: skip
        """Train `model`.

        Args:
            model: The drafter.
            vocabulary: The target's embedding.
            head: Its LM head, fp32.
            signals: What it computed for the texts.
            answers: Index of the first token of each text's answer.
            preset: Settings of the run.
        """
        self._model, self._signals, self._preset = model, signals, preset
        self._embedding, self._head = vocabulary, model.draft_head(head)
        starts = torch.tensor(signals.starts)
        lengths = starts.diff()
        self._positions = torch.arange(len(signals.tokens))
        self._positions -= starts[:-1].repeat_interleave(lengths)
        first = (torch.tensor(answers) - starts[:-1]).repeat_interleave(lengths)
        self._possible = self._positions >= first
        self._possible[starts[1:] - 1] = False  # no next token

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        model, signals, preset = self._model, self._signals, self._preset
        real = indices != PADDING
        indices = indices.clamp(min=0)
        positions = self._positions[indices].masked_fill(~real, -1)
        possible = self._possible[indices] & real
        tokens = signals.tokens[indices]
        blocks = Blocks.draw(model.config, tokens, positions, possible, preset.anchors)
        embedded = self._embedding[blocks.fed].float()
        taps = signals.taps[indices].float()
        hidden, features, confidence = forward(embedded, blocks, positions, taps)
        labels = model.draft_rows(blocks.labels).flatten(0, 1)
        weights, known = label_weights(labels, blocks.counted.flatten(0, 1), len(self._head))
        used = known & (weights > 0)
        states = signals.hidden[indices].flatten(0, 1)[blocks.target.flatten(0, 1)[used]].float()
        total, distances = block_loss(
            hidden[used],
            None if features is None else features[used],
            None if model.markov_head is None else model.markov_head.markov_w2.weight,
            states,
            self._head,
            weights[used],
            preset,
        )
        if confidence is not None:
            distance = torch.full_like(weights, 2.0)
            distance[used] = distances
            total = total + confidence_loss(confidence, distance, weights, preset)
        return total
