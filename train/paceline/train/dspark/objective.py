"""The loss of a DSpark step (equations 9 to 12)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel
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
            Of the N blocks of all rows: hidden states for the LM head `[N, levels, hidden]`, the
            sequential head's bias on their logits `[N, levels, V]` or of drafted tokens alone, and
            logits of the confidences `[N, levels]`; None for a head that the drafter does not have.
        """
        model = self.model
        hidden = model(embedded, blocks.anchors, taps, positions).flatten(0, 1)
        bias = rows = confidence = None
        if model.markov_head is not None:
            bias, rows = model.markov_head(model.draft_rows(blocks.before).flatten(0, 1), hidden)
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
        possible = whole_blocks(tokens, config.levels, self._separator)
        if not possible.any():
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} hold no block of {config.levels}: every "
                "text is shorter; give longer ones or a smaller block"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        blocks = Blocks.draw(config, tokens, positions, possible, preset.anchors)
        taps, logits = target.read(tokens, blocks.target.flatten())
        hidden, bias, confidence = forward(
            target.embed(blocks.fed), blocks, positions, taps.view(*tokens.shape, -1).float()
        )
        drafted = F.linear(hidden.to(target.head.dtype), target.head).float()
        if bias is not None:
            drafted = drafted + bias
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
    levels, count = draft.shape[1:]
    other = labels == count
    reached = counted & (other.cumsum(1) - other.long() == 0)
    weights = torch.exp(-torch.arange(levels, device=draft.device) / levels) * reached
    entropy = -draft.gather(-1, labels.clamp(max=count - 1)[..., None]).squeeze(-1)
    distance = (draft.exp() - target.exp()).abs().sum(-1)
    loss = (preset.ce * entropy + preset.tv * distance) * ~other
    if confidence is not None:
        accepted = (1 - distance.detach() / 2).clamp(0, 1) * ~other  # equation 8
        loss = loss + preset.certainty * F.binary_cross_entropy_with_logits(
            confidence.float(), accepted, reduction="none"
        )
    return (loss * weights).sum() / counted[:, 0].sum()
