"""Hidden states of chosen layers at committed positions, kept for drafters beside the KV."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.shm import TAP_MARGIN
from paceline.verifier.kv.layout import KvLayout, round_up


@dataclass(frozen=True)
class Taps:
    """What a drafter asked for.

    Attributes:
        layers: Layers whose outputs it reads, 0 for the first, rising.
        window: Only so many positions before the committed length are promised; 0: all. Unit:
            tokens.
    """

    layers: tuple[int, ...]
    window: int = 0


@dataclass(frozen=True)
class TapLayout:
    """Where they lie: planes of ``[slots, hidden]``, one a layer; position p has slot p % slots.

    Attributes:
        taps: What was asked for.
        slots: Positions that are kept: those of the window and a margin, or all there can be.
        hidden: Elements of a row.
        dtype: Type of the elements, the KV's.
    """

    taps: Taps
    slots: int
    hidden: int
    dtype: torch.dtype

    @classmethod
    def of(cls, taps: Taps, layout: KvLayout, capacity: int) -> TapLayout:
        """For a cache of ``capacity`` slots."""
        slots = min(capacity, round_up(taps.window) + TAP_MARGIN) if taps.window else capacity
        return cls(taps, slots, layout.hidden, layout.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one plane."""
        return self.hidden * self.dtype.itemsize

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane."""
        return self.slots * self.row_bytes

    @property
    def byte_size(self) -> int:
        """Bytes of all planes."""
        return len(self.taps.layers) * self.plane_bytes


class TapPlanes:
    """The hidden states of one cache. Written by the engine thread alone.

    Rows are written before the committed length that covers them is published, and may overwrite
    those that are more than ``slots`` older: see :class:`paceline.shm.SegmentHeader`.

    Attributes:
        layout: How they lie.
        rows: The planes, ``[layers, slots, hidden]``.
    """

    def __init__(self, layout: TapLayout, memory: Tensor) -> None:
        """Over flat memory of the layout's type and size."""
        self.layout = layout
        self._first = sys.maxsize  # nothing was recorded below
        self.rows = memory.view(len(layout.taps.layers), layout.slots, layout.hidden)

    def record(self, first: int, states: Mapping[int, Tensor], rows: slice | list[int]) -> None:
        """Keep positions from ``first`` on.

        Args:
            first: Position of the first row.
            states: Outputs of the layers, ``[M, hidden]`` each.
            rows: Which of the M rows they are, in order of positions.
        """
        slots = self.layout.slots
        self._first = min(self._first, first)
        for plane, layer in zip(self.rows, self.layout.taps.layers, strict=True):
            news = states[layer][rows]
            done = max(0, len(news) - slots)  # what would be overwritten at once
            while done < len(news):
                at = (first + done) % slots
                part = news[done : done + slots - at]
                plane[at : at + len(part)] = part
                done += len(part)

    def copy(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        """Copies of the rows of positions ``begin`` to ``end``, ``[n, hidden]`` for each layer."""
        slots = torch.arange(begin, end) % self.layout.slots
        kept = self.layout.taps.layers
        return [self.rows[kept.index(layer)].index_select(0, slots) for layer in layers]

    def first_kept(self, committed: int) -> int:
        """The oldest position that is there when so many are committed."""
        return max(self._first, committed - self.layout.slots)

    def reusable(self, source: TapPlanes | None, committed: int, shared: int) -> int:
        """Positions that a text may take from another cache and still have the states it promises.

        Args:
            source: The other's states, if it keeps any.
            committed: The other's committed length.
            shared: Positions that both texts have in common.

        Returns:
            ``shared`` where the other has the promised ones; else so many fewer that the missing
            ones are computed again.
        """
        taps = self.layout.taps
        wanted = max(0, shared - taps.window) if taps.window else 0
        if source is None or not set(taps.layers) <= set(source.layout.taps.layers):
            return wanted
        return shared if wanted >= source.first_kept(committed) else wanted

    def copy_prefix(self, source: TapPlanes, tokens: int) -> None:
        """Take the newest of the first ``tokens`` positions from another cache that has them."""
        taps = self.layout.taps
        begin = max(0, tokens - taps.window) if taps.window else 0
        copies = source.copy(taps.layers, begin, tokens)
        states = dict(zip(taps.layers, copies, strict=True))
        self.record(begin, states, slice(None))
