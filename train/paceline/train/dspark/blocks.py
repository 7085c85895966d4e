"""Random blocks of a batch, packed by indices: inputs, visible positions and labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafter.methods.dspark import DSparkConfig


@dataclass(frozen=True)
class Blocks:
    """N blocks over a batch of B rows of S tokens; indices are into the flattened batch.

    Visible positions are given as indices instead of a mask, so the cost of a step depends on the
    number of visible positions, not on the length of the rows (DSpark, section 5.1). With a window
    of 0 a block attends to all of its row before the anchor.

    Attributes:
        anchors: Positions in their rows, int64 `[N]`.
        fed: Tokens fed, anchor and masks, int64 `[N, block]`.
        before: The token before each predicted one, int64 `[N, levels]`.
        labels: The tokens to predict, like `before`.
        target: Indices whose target states predict the labels, like `before`.
        used: Indices whose hidden states any block attends to, int64 `[U]`.
        seen: For each block its indices into `used`, padded with -1, int64 `[N, C]`.
    """

    anchors: Tensor
    fed: Tensor
    before: Tensor
    labels: Tensor
    target: Tensor
    used: Tensor
    seen: Tensor

    @classmethod
    def at(cls, config: DSparkConfig, tokens: Tensor, rows: Tensor, anchors: Tensor) -> Blocks:
        """The blocks at given positions.

        Args:
            config: Of the drafter.
            tokens: int64 `[B, S]`; each anchor has `config.levels` tokens behind it.
            rows: Row of each block, int64 `[N]`.
            anchors: Position of its anchor, at least 1, int64 `[N]`.
        """
        length = tokens.shape[1]
        ahead = torch.arange(config.levels, device=tokens.device)
        target = (rows * length + anchors)[:, None] + ahead
        flat = tokens.flatten()
        fed = torch.full((len(anchors), config.block), config.mask_token, device=tokens.device)
        fed[:, 0] = flat[target[:, 0]]
        reach = min(config.window or length, int(anchors.max()))
        back = anchors[:, None] - 1 - torch.arange(reach, device=tokens.device)
        indices = torch.where(back >= 0, rows[:, None] * length + back, -1)
        used, seen = indices.unique(return_inverse=True)
        if used[0] < 0:
            used, seen = used[1:], seen - 1
        return cls(anchors, fed, flat[target], flat[target + 1], target, used, seen)

    @classmethod
    def draw(
        cls, config: DSparkConfig, tokens: Tensor, count: int, separator: int
    ) -> Blocks | None:
        """Up to `count` random blocks of each row, from torch's global generator.

        A block begins at the second token or later, and never continues after a `separator`, where
        another text begins. None if the batch has room for no block.
        """
        usable = tokens.shape[1] - config.levels
        inside = (tokens != separator).unfold(1, config.levels, 1).all(-1)[:, :usable].clone()
        inside[:, 0] = False
        chance = torch.rand(inside.shape).to(tokens.device).masked_fill(~inside, -1.0)
        best = chance.topk(min(count, usable), dim=1)
        rows, order = (best.values >= 0).nonzero(as_tuple=True)
        if not len(rows):
            return None
        return cls.at(config, tokens, rows, best.indices[rows, order])
