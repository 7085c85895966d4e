"""Cache slots of the tokens of several generations, and the cache of a window of each text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafter.methods.layers import LayerShape
from paceline.kernels import CHUNK, MAX_TREE_NODES, TreePlan, TreeSegment, plan_trees

_GROWTH = 512

SlotRun = tuple[int, int]
"""First slot, and number of tokens in consecutive slots from there on."""


def ring_slots(begin: int, end: int, window: int) -> list[SlotRun]:
    """Returns the slots of positions ``begin`` to ``end`` where position p has slot p % window.

    Args:
        begin: First position.
        end: One past the last, at most ``begin + window``.
        window: Slots of the ring; 0: position p has slot p.
    """
    runs: list[SlotRun] = []
    while begin < end:
        slot = begin % window if window else begin
        room = window - slot if window else end - begin
        count = min(end - begin, room, MAX_TREE_NODES)
        runs.append((slot, count))
        begin += count
    return runs


def plan_slots(
    runs: Sequence[Sequence[SlotRun]], positions: Sequence[int], device: torch.device
) -> TreePlan:
    """Plans where keys and values are written.

    Args:
        runs: Slots of each sequence's tokens.
        positions: Position in its text of every token, sequence after sequence.
        device: Device of the caches.
    """
    segments = [
        TreeSegment(index, slot, None, count)
        for index, each in enumerate(runs)
        for slot, count in each
    ]
    return plan_trees(segments, positions=positions, device=device)


def chain_segments(index: int, begin: int, end: int) -> list[TreeSegment]:
    """Returns positions ``begin`` to ``end`` of cache ``index``, cut at multiples of ``CHUNK``.

    With these cuts the bits of their KV do not depend on how a text is split over forward passes.
    """
    segments = []
    while begin < end:
        stop = min(end, (begin // CHUNK + 1) * CHUNK)
        segments.append(TreeSegment(index, begin, None, stop - begin))
        begin = stop
    return segments


class WindowCache:
    """KV of one generation's text, followed by slots for a tree or a block.

    With a window, position p of the text has slot ``p % window``: a new token overwrites the one
    that has just left every window, nothing is ever moved, and memory is constant. Without one,
    position p has slot p and memory grows with the text.
    """

    def __init__(
        self,
        shape: LayerShape,
        layers: int,
        window: int,
        extra: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Creates an empty cache.

        Args:
            shape: Heads of keys and values.
            layers: Number of layers.
            window: Positions of the text that are kept; 0: all. Unit: tokens.
            extra: Slots after those of the text.
            dtype: Type of keys and values.
            device: Device of keys and values.
        """
        self.length = 0
        """Positions of the text below this were written."""
        self.window = window
        self._extra = extra
        self._shape = (layers, 2, shape.kv_heads)
        self._dim, self._dtype, self._device = shape.head_dim, dtype, device
        self._store = self._allocate(window + extra if window else _GROWTH)

    @property
    def nbytes(self) -> int:
        """Size of the buffer. Unit: bytes."""
        return self._store.nbytes

    @property
    def extra_slot(self) -> int:
        """First slot after those of the text."""
        return min(self.length, self.window) if self.window else self.length

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, ``[Hkv, slots, D]``; invalid after reserve."""
        keys, values = self._store[index]
        return keys, values

    def next_position(self, end: int) -> int:
        """Returns the first position below ``end`` that is to be written, in the newest window."""
        return max(self.length, end - self.window) if self.window else self.length

    def slots(self, begin: int, end: int) -> list[SlotRun]:
        """Returns the slots of positions ``begin`` to ``end``, at most ``window`` of them."""
        return ring_slots(begin, end, self.window)

    def reserve(self, end: int) -> None:
        """Allocates slots for the positions below ``end`` and the extra ones."""
        needed = end + self._extra
        if not self.window and needed > self._store.shape[3]:
            grown = self._allocate(max(needed, 2 * self._store.shape[3]))
            grown[..., : self._store.shape[3], :] = self._store
            self._store = grown

    def _allocate(self, slots: int) -> Tensor:
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            # Zeros: a slot that was never written is masked, but still multiplied by 0.
            shape = (*self._shape, slots, self._dim)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
