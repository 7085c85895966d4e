"""Hidden states of some layers at committed positions, kept for drafters next to the KV."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kv.segment import TAP_MARGIN
from paceline.verifier.kv.layout import KvLayout, round_up


@dataclass(frozen=True)
class Taps:
    """The hidden states that a drafter reads.

    Attributes:
        layers: Layers whose outputs it reads, counted from 0, rising.
        window: Newest positions that are guaranteed to be kept; 0: all. Unit: tokens.
    """

    layers: tuple[int, ...]
    window: int = 0


@dataclass(frozen=True)
class TapLayout:
    """Layout: one plane of ``[slots, hidden]`` per layer; position p has slot p % slots.

    Attributes:
        taps: The requested layers and window.
        slots: Positions that are kept: the window and a margin, or the whole capacity.
        hidden: Elements of a row.
        dtype: Type of the elements.
    """

    taps: Taps
    slots: int
    hidden: int
    dtype: torch.dtype

    @classmethod
    def of(cls, taps: Taps, layout: KvLayout, capacity: int) -> TapLayout:
        """Returns the layout for a cache of ``capacity`` slots."""
        slots = min(capacity, round_up(taps.window) + TAP_MARGIN) if taps.window else capacity
        return cls(taps, slots, layout.hidden, layout.hidden_dtype)

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

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the rows of so many positions."""
        return len(self.taps.layers) * min(tokens, self.slots) * self.row_bytes


class TapPlanes:
    """The hidden states of one cache. Written by the engine thread alone.

    Rows are written before the committed length that covers them is published, and overwrite those
    that are ``slots`` older: see :class:`paceline.kv.segment.SegmentHeader`.

    Attributes:
        layout: Their layout.
        rows: The planes, ``[layers, slots, hidden]``.
    """

    def __init__(self, layout: TapLayout, memory: Tensor) -> None:
        """View flat memory of the layout's type and size."""
        self.layout = layout
        self._first = sys.maxsize  # first position that was ever written
        self.rows = memory.view(len(layout.taps.layers), layout.slots, layout.hidden)

    def record(self, first: int, states: Mapping[int, Tensor], rows: slice | list[int]) -> None:
        """Write the rows of positions from ``first`` on.

        Args:
            first: Position of the first row.
            states: Outputs of the layers, ``[M, hidden]`` each.
            rows: The rows to write, in order of positions.
        """
        slots = self.layout.slots
        self._first = min(self._first, first)
        for plane, layer in zip(self.rows, self.layout.taps.layers, strict=True):
            new = states[layer][rows]
            done = max(0, len(new) - slots)  # earlier rows would be overwritten at once
            while done < len(new):
                at = (first + done) % slots
                part = new[done : done + slots - at]
                plane[at : at + len(part)] = part
                done += len(part)

    def copy(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        """Returns copies of the rows ``begin`` to ``end``, ``[n, hidden]`` for each layer."""
        slots = torch.arange(begin, end) % self.layout.slots
        kept = self.layout.taps.layers
        return [self.rows[kept.index(layer)].index_select(0, slots) for layer in layers]

    def first_kept(self, committed: int) -> int:
        """Returns the oldest position that is kept at a committed length."""
        return max(self._first, committed - self.layout.slots)

    def reusable(self, source: TapPlanes | None, committed: int, shared: int) -> int:
        """Returns how many positions can be copied from another cache with their hidden states.

        Args:
            source: Hidden states of the other cache, or None.
            committed: Committed length of the other cache.
            shared: Length of the common prefix of both texts.

        Returns:
            ``shared`` if the other cache has all rows of the window; else fewer, so that prefill
            computes the missing rows again.
        """
        taps = self.layout.taps
        needed = max(0, shared - taps.window) if taps.window else 0
        if source is None or not set(taps.layers) <= set(source.layout.taps.layers):
            return needed
        return shared if needed >= source.first_kept(committed) else needed

    def copy_prefix(self, source: TapPlanes, tokens: int) -> None:
        """Copy the rows of the first ``tokens`` positions, or of the window, from another cache."""
        taps = self.layout.taps
        begin = max(0, tokens - taps.window) if taps.window else 0
        copies = source.copy(taps.layers, begin, tokens)
        states = dict(zip(taps.layers, copies, strict=True))
        self.record(begin, states, slice(None))
