"""The backbone's KV of one generation: of the target's hidden states, and of the newest block."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.slots import SlotRun, ring_slots

_GROWTH = 512


class DSparkContext:
    """Keys and values of the context, followed by those of the block while one is drafted.

    With a window, position p has slot ``p % window`` and memory is constant. Without one, position
    p has slot p and memory grows with the text. The block's keys follow the newest context, and the
    next round overwrites them. So a block attends to the first slots, whose order does not matter
    to attention.
    """

    def __init__(
        self, config: DSparkConfig, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Creates an empty context."""
        self.length = 0
        """Positions of the text below this are in the context."""
        self._window = config.window
        self._block = config.block
        self._shape = (config.layers, 2, config.kv_heads)
        self._dim = config.head_dim
        self._dtype, self._device = dtype, device
        self._store = self._allocate(config.window + config.block if config.window else _GROWTH)

    @property
    def nbytes(self) -> int:
        """Size of the buffer. Unit: bytes."""
        return self._store.nbytes

    def next_position(self, end: int) -> int:
        """Returns the first position to be added for an anchor at position ``end``."""
        return max(self.length, end - self._window) if self._window else self.length

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, ``[Hkv, slots, D]``; invalid after reserve."""
        both = self._store[index]
        return both[0], both[1]

    def reserve(self, end: int) -> None:
        """Reserves slots for the positions below ``end`` and a block."""
        needed = end + self._block
        if not self._window and needed > self._store.shape[3]:
            grown = self._allocate(max(needed, 2 * self._store.shape[3]))
            grown[..., : self._store.shape[3], :] = self._store
            self._store = grown

    def slots(self, begin: int, end: int) -> list[SlotRun]:
        """Returns the slots of positions ``begin`` to ``end``, at most ``window`` of them."""
        return ring_slots(begin, end, self._window)

    @property
    def block_slot(self) -> int:
        """First slot of the block."""
        return min(self.length, self._window) if self._window else self.length

    def _allocate(self, slots: int) -> Tensor:
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            shape = (*self._shape, slots, self._dim)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
