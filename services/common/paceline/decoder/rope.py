"""Cosines and sines of the rotary position embedding, by position."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_FIRST_ROWS = 4096


class RopeShape(Protocol):
    """The fields of :class:`paceline.decoder.DecoderConfig` that a table needs."""

    @property
    def rope_inv_freq(self) -> tuple[float, ...]: ...

    @property
    def rope_scaling(self) -> float: ...

    @property
    def max_position(self) -> int: ...


class Rope:
    """The table of a model, extended on demand.

    Angles are float32 as in transformers. Their cosines are taken in float64 and then rounded, so
    that processors with different float32 functions have the same table.
    """

    def __init__(self, config: RopeShape, device: torch.device | str) -> None:
        """Prepare the table of a model."""
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        self._scaling = config.rope_scaling
        self._most = config.max_position
        self._table = self._rows(min(_FIRST_ROWS, config.max_position))

    def table(self, longest: int) -> Tensor:
        """float32 ``[positions, D]`` up to at least position ``longest``: cosines, then sines."""
        if longest >= self._table.shape[0]:
            doubled = min(1 << (longest + 1).bit_length(), self._most)
            self._table = self._rows(max(doubled, longest + 1))
        return self._table

    def _rows(self, count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angles = (positions[:, None] * self._inv_freq).double()
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self._scaling).float()
