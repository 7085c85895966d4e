"""Cache slots of the tokens of several generations, and the cache of a window of each text."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafter.methods.layers import LayerShape
from paceline.kernels import CHUNK, LayerTable, TreeSegment

_GROWTH = 512


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
    """KV of one generation's text, followed by slots for a tree or a block; a ``KVCacheView``.

    Position p of the text has slot ``p - base``. With a window, the newest positions are moved to
    the front when the slots are used up, so memory is constant. ``base`` is a multiple of
    ``CHUNK``: attention has the same bits after any number of moves.
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

        It keeps ``window`` positions of the text (0: all), and has ``extra`` slots behind them.
        """
        self.length = 0
        """Positions of the text below this were written."""
        self.base = 0
        """Position in the first slot."""
        self.window = window
        self._extra = extra
        self._shape = (layers, 2, shape.kv_heads)
        self._dim, self._dtype, self._device = shape.head_dim, dtype, device
        self._keep(self._allocate(window + CHUNK + extra if window else _GROWTH))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, ``[Hkv, slots, D]``; invalid after reserve."""
        return self._views[index]

    def next_position(self, end: int) -> int:
        """Returns the first position below ``end`` that is to be written, in the newest window."""
        return max(self.length, end - self.window) if self.window else self.length

    def reserve(self, end: int) -> None:
        """Makes room for the positions below ``end`` and the extra slots."""
        slots = self._store.shape[3]
        if end - self.base + self._extra <= slots:
            return
        if not self.window:
            grown = self._allocate(max(end + self._extra, 2 * slots))
            grown[..., :slots, :] = self._store
            self._keep(grown)
            return
        base = (end - self.window) // CHUNK * CHUNK
        kept = self._store[..., base - self.base : max(base, self.length) - self.base, :].clone()
        self._store[..., : kept.shape[3], :] = kept
        self.base = base

    def _keep(self, store: Tensor) -> None:
        self._store = store
        self._views = [(both[0], both[1]) for both in store]
        self.table = LayerTable.of(self._views)

    def _allocate(self, slots: int) -> Tensor:
        with torch.inference_mode(False):  # otherwise only inference mode could write to it
            # Zeros: a slot that was never written is masked, but still multiplied by 0.
            shape = (*self._shape, slots, self._dim)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
