"""Which positions a follower is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.kernels import streaming


class Selection(ABC):
    """Chooses positions of each followed layer, after every round anew."""

    @abstractmethod
    def choose(self, committed: int, budget: int) -> list[Tensor]:
        """Positions for each layer, rising, all below ``committed``, equally many everywhere.

        Args:
            committed: Positions there are, at least 1. Unit: tokens.
            budget: Most of a layer, at least 1. Unit: tokens.
        """


class Streaming(Selection):
    """The first and the newest positions, the same in every layer."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def choose(self, committed: int, budget: int) -> list[Tensor]:
        parts = [torch.arange(part.start, part.stop) for part in streaming(committed, budget)]
        return [torch.cat(parts)] * self._layers
