"""Random blocks of a batch of texts: inputs, labels and what counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafter.methods.dspark import DSparkConfig


@dataclass(frozen=True)
class Blocks:
    """G blocks of each of B rows of S tokens.

    Attributes:
        anchors: Positions in their texts, int64 `[B, G]`.
        fed: Tokens fed, anchor and masks, int64 `[B, G, block]`.
        before: The token before each predicted one, int64 `[B, G, levels]`.
        labels: The tokens to predict, like `before`.
        target: Indices into the flattened batch of the target states that predict the labels, like
            `before`.
        counted: Whether the text has this label, and the row this block, bool like `before`.
    """

    anchors: Tensor
    fed: Tensor
    before: Tensor
    labels: Tensor
    target: Tensor
    counted: Tensor

    @classmethod
    def draw(
        cls, config: DSparkConfig, tokens: Tensor, positions: Tensor, possible: Tensor, count: int
    ) -> Blocks:
        """Draw up to `count` random blocks of each row, from torch's global generator.

        Args:
            config: Of the drafter.
            tokens: int64 `[B, S]`.
            positions: Their positions in their texts, -1 for padding, like `tokens`.
            possible: Where a block may begin, bool like `tokens`.
            count: Most blocks of a row. A row with fewer such places has blocks that do not count.
        """
        length = tokens.shape[1]
        chance = torch.rand(tokens.shape).to(tokens.device).masked_fill(~possible, -1.0)
        best = chance.topk(min(count, length), dim=1)
        ahead = torch.arange(config.levels + 1, device=tokens.device)
        places = best.indices[..., None] + ahead
        inside = (places < length) & (best.values >= 0)[..., None]
        rows = torch.arange(len(tokens), device=tokens.device)[:, None, None] * length
        places = rows + places.clamp(max=length - 1)
        text, at = tokens.flatten()[places], positions.flatten()[places]
        shape = (*best.indices.shape, config.block)
        fed = torch.full(shape, config.mask_token, device=tokens.device)
        fed[..., 0] = text[..., 0]
        counted = (inside & (at >= 0))[..., 1:]
        return cls(at[..., 0], fed, text[..., :-1], text[..., 1:], places[..., :-1], counted)


def whole_blocks(tokens: Tensor, levels: int, separator: int) -> Tensor:
    """Where a block may begin in rows of several texts.

    This is at the second token or later, `levels` tokens before the row's end, and never if the
    block would continue after a `separator`, where another text begins.

    Args:
        tokens: int64 `[B, S]`.
        levels: Tokens that a block predicts.
        separator: The token between texts.

    Returns:
        bool `[B, S]`.
    """
    possible = torch.zeros_like(tokens, dtype=torch.bool)
    inside = (tokens != separator).unfold(1, levels, 1).all(-1)
    usable = tokens.shape[1] - levels
    possible[:, 1:usable] = inside[:, 1:usable]
    return possible
