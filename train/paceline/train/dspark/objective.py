"""The loss of a DSpark step (equations 9 to 12)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel
from paceline.train.batches import Batches
from paceline.train.dspark.blocks import Blocks
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
            embedded: Of `blocks.fed`, `[N, block, hidden]`.
            blocks: The blocks.
            positions: Of `blocks.used`, int64 `[U]`.
            taps: Likewise, `[U, taps * hidden]`.

        Returns:
            Hidden states for the LM head `[N, levels, hidden]`, the sequential head's bias on
            their logits `[N, levels, V]`, and logits of the confidences `[N, levels]`; None for a
            head that the drafter does not have.
        """
        model = self.model
        hidden = model(embedded, blocks.anchors, taps, positions, blocks.seen)
        bias = rows = confidence = None
        if model.markov_head is not None:
            bias, rows = model.markov_head(blocks.before, hidden)
        if model.confidence_head is not None:
            confidence = model.confidence_head(hidden, rows)
        return hidden, bias, confidence


class BlockLoss:
    """The :data:`~paceline.train.loop.Loss` of a run.

    Blocks are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self,
        config: DSparkConfig,
        target: TappedTarget,
        batches: Batches,
        preset: DSparkPreset,
        separator: int,
    ) -> None:
        self._config, self._target, self._batches = config, target, batches
        self._preset, self._separator = preset, separator

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        config, preset, target = self._config, self._preset, self._target
        tokens = self._batches.stream[indices].to(target.head.device)
        blocks = Blocks.draw(config, tokens, preset.anchors, self._separator)
        if blocks is None:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} hold no block of {config.levels}: every "
                "text is shorter; give longer ones or a smaller block"
            )
        taps, logits = target.read(tokens, blocks.target.flatten())
        hidden, bias, confidence = forward(
            target.embed(blocks.fed),
            blocks,
            blocks.used % tokens.shape[1],
            taps[blocks.used].float(),
        )
        drafted = F.linear(hidden.to(target.head.dtype), target.head).float()
        if bias is not None:
            drafted = drafted + bias
        return weighted_loss(
            drafted.log_softmax(-1),
            logits.float().log_softmax(-1).view_as(drafted),
            blocks.labels,
            confidence,
            preset,
        )


def weighted_loss(
    draft: Tensor, target: Tensor, labels: Tensor, confidence: Tensor | None, preset: DSparkPreset
) -> Tensor:
    """Equation 12, a scalar: the mean over blocks of weighted sums over positions.

    Args:
        draft: Logs of the drafter's probabilities, fp32 `[N, levels, V]`.
        target: The target's, likewise.
        labels: The text's tokens, int64 `[N, levels]`.
        confidence: Logits of the confidences, `[N, levels]`, or None.
        preset: The three weights.
    """
    levels = draft.shape[1]
    weights = torch.exp(-torch.arange(levels, device=draft.device) / levels)
    entropy = -draft.gather(-1, labels[..., None]).squeeze(-1)
    distance = (draft.exp() - target.exp()).abs().sum(-1)
    loss = preset.ce * entropy + preset.tv * distance
    if confidence is not None:
        accepted = (1 - distance.detach() / 2).clamp(0, 1)  # equation 8
        loss = loss + preset.certainty * F.binary_cross_entropy_with_logits(
            confidence.float(), accepted, reduction="none"
        )
    return (loss * weights).sum(1).mean()
