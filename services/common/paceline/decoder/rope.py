"""Rotary position embedding of packed heads."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.decoder.config import DecoderConfig

_FIRST_ROWS = 4096


class Rope:
    """Cosines and sines by position, grown on demand; angles in float32 as in transformers."""

    def __init__(self, config: DecoderConfig, device: torch.device | str) -> None:
        """Prepare the table of a model."""
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        self._scaling = config.rope_scaling
        self._table = self._rows(min(_FIRST_ROWS, config.max_position))

    def rows(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Factors of one step, to be given to :func:`rotate` in every layer.

        Args:
            positions: int64 ``[M]``.
            longest: Largest position among them.

        Returns:
            Cosines and signed sines, each float32 ``[M, 1, D]``.
        """
        if longest >= self._table.shape[0]:
            self._table = self._rows(1 << (longest + 1).bit_length())
        cos, sin = self._table[positions].chunk(2, dim=-1)
        return cos, sin

    def _rows(self, count: int) -> Tensor:
        """``[count, 1, 2 D]``: cosines twice, then sines, the first half of them negative."""
        positions = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angles = positions[:, None, None] * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat([cos, cos, -sin, sin], dim=-1)


def rotate(heads: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads ``[M, H, D]`` of any float type; returns float32 ``[M, H, D]``."""
    cos, sin = factors
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * cos).addcmul_(swapped, sin)
