"""The loss of a DSpark step (equations 9 to 12)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.dspark import DSparkModel
from paceline.train.batches import Batches
from paceline.train.dspark.blocks import Blocks, whole_blocks
from paceline.train.dspark.preset import DSparkPreset
from paceline.train.dspark.target import TappedTarget


class BlockDrafter(nn.Module):
    """Backbone and heads as one module, to be trained."""

    def __init__(self, model: DSparkModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, embedded: Tensor, blocks: Blocks, positions: Tensor, taps: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run backbone and heads on blocks of known text.

        Args:
            embedded: Of `blocks.fed`, `[B, G, block, hidden]`.
            blocks: The blocks.
            positions: Of the rows' tokens, int64 `[B, S]`.
            taps: Likewise, `[B, S, taps * hidden]`.

        Returns:
            Of the N blocks of all rows: hidden states for the LM head `[N, levels, hidden]`,
            features of the sequential head `[N, levels, r]`, and logits of the confidences
            `[N, levels]`; None for a head that the drafter does not have.
        """
        model = self.model
        hidden = model(embedded, blocks.anchors, taps, positions).flatten(0, 1)
        features = rows = confidence = None
        if model.markov_head is not None:
            features, rows = model.markov_head(
                model.draft_rows(blocks.before).flatten(0, 1), hidden
            )
        if model.confidence_head is not None:
            confidence = model.confidence_head(hidden, rows)
        return hidden, features, confidence


class BlockLoss:
    """The :data:`~paceline.train.loop.Loss` of a run.

    Blocks are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self,
        model: DSparkModel,
        target: TappedTarget,
        batches: Batches,
        preset: DSparkPreset,
        separator: int,
    ) -> None:
        self._model, self._target, self._batches = model, target, batches
        self._preset, self._separator = preset, separator

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        model, preset, target = self._model, self._preset, self._target
        config = model.config
        tokens = self._batches.stream[indices].to(target.head.device)
        possible = whole_blocks(tokens, config.levels, self._separator)
        if not possible.any():
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} hold no block of {config.levels}: every "
                "text is shorter; give longer ones or a smaller block"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        blocks = Blocks.draw(config, tokens, positions, possible, preset.anchors)
        taps, logits = target.read(tokens, blocks.target.flatten())
        hidden, features, confidence = forward(
            target.embed(blocks.fed), blocks, positions, taps.view(*tokens.shape, -1).float()
        )
        drafted = F.linear(hidden.to(target.head.dtype), target.head).float()
        if model.markov_head is not None:
            drafted = drafted + model.markov_head.markov_w2(features)
        return weighted_loss(
            drafted.log_softmax(-1),
            logits.float().log_softmax(-1).view_as(drafted),
            blocks.labels.flatten(0, 1),
            blocks.counted.flatten(0, 1),
            confidence,
            preset,
        )


def weighted_loss(
    draft: Tensor,
    target: Tensor,
    labels: Tensor,
    counted: Tensor,
    confidence: Tensor | None,
    preset: DSparkPreset,
) -> Tensor:
    """Equation 12, a scalar: the mean over blocks of weighted sums over positions.

    The cross-entropy is that of the target's distribution: its mean is that of the paper, whose
    labels are tokens, and its gradient has less noise.

    A label that is not drafted teaches the confidence head alone, that it is never accepted, and
    ends its block.

    Args:
        draft: Logs of the drafter's probabilities of the R drafted tokens, fp32 `[N, levels, R]`.
        target: The target's, likewise.
        labels: Rows of the text's tokens among the drafted ones, R for others, int64 `[N, levels]`.
        counted: Labels that there are, bool like `labels`.
        confidence: Logits of the confidences, `[N, levels]`, or None.
        preset: The three weights.
    """
    count = draft.shape[-1]
    weights, known = label_weights(labels, counted, count)
    entropy = -(target.exp() * draft).sum(-1)
    distance = (draft.exp() - target.exp()).abs().sum(-1)
    loss = ((preset.ce * entropy + preset.tv * distance) * known * weights).sum()
    if confidence is not None:
        distance = torch.where(known, distance, 2.0)
        loss = loss + confidence_loss(confidence, distance, weights, preset)
    return loss


def label_weights(labels: Tensor, counted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The weight of each label, fp32, and whether it is drafted, both `[N, levels]`.

    Labels are those of :func:`weighted_loss`, rows of `count` drafted tokens.
    """
    levels, other = labels.shape[1], labels == count
    reached = counted & (other.cumsum(1) - other.long() == 0)
    falling = torch.exp(-torch.arange(levels, device=labels.device) / levels)
    return falling * reached / counted[:, 0].sum(), ~other


def confidence_loss(
    confidence: Tensor, distance: Tensor, weights: Tensor, preset: DSparkPreset
) -> Tensor:
    """The weighted loss of the confidences: logits, all `[N, levels]`."""
    accepted = (1 - distance.detach() / 2).clamp(0, 1)  # equation 8
    entropy = F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
    return preset.certainty * (entropy * weights).sum()
