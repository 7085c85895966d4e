"""What one generation keeps of its target's hidden states: keys and values for every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafter.methods.longspec_ring import Run
from paceline.dspark import DSparkConfig

_GROWTH = 512


class DSparkContext:
    """Keys and values of the context, and of the block behind it while one is drafted.

    With a window, position p has slot ``p % window``: memory that never grows. Without one, slot p
    of memory that grows with the text. The block's own keys lie behind the newest context, where
    the next round's will overwrite them; so all that a block sees are the first so many slots, and
    in what order they lie makes no difference to attention.
    """

    def __init__(
        self, config: DSparkConfig, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Make an empty context."""
        self.length = 0
        """Positions of the text below this have been taken in."""
        self._window = config.window
        self._block = config.block
        self._shape = (config.layers, 2, config.kv_heads)
        self._dim = config.head_dim
        self._dtype, self._device = dtype, device
        self._store = self._allocate(config.window + config.block if config.window else _GROWTH)

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self._store.nbytes

    def wanted(self, end: int) -> int:
        """First position that is still to be taken in when the text's anchor is at ``end``."""
        return max(self.length, end - self._window) if self._window else self.length

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each ``[Hkv, slots, D]``; stale after :meth:`reserve`."""
        both = self._store[index]
        return both[0], both[1]

    def reserve(self, end: int) -> None:
        """Make room for the positions below ``end`` and a block."""
        need = end + self._block
        if not self._window and need > self._store.shape[3]:
            grown = self._allocate(max(need, 2 * self._store.shape[3]))
            grown[..., : self._store.shape[3], :] = self._store
            self._store = grown

    def runs(self, begin: int, end: int) -> list[Run]:
        """Where the positions ``begin`` to ``end`` belong; at most ``window`` of them."""
        if not self._window:
            return [(begin, end - begin)] if begin < end else []
        runs: list[Run] = []
        while begin < end:
            slot = begin % self._window
            count = min(end - begin, self._window - slot)
            runs.append((slot, count))
            begin += count
        return runs

    @property
    def block_slot(self) -> int:
        """Where the block's own keys begin."""
        return min(self.length, self._window) if self._window else self.length

    def _allocate(self, slots: int) -> Tensor:
        with torch.inference_mode(False):  # or it could only be written in inference mode
            shape = (*self._shape, slots, self._dim)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
