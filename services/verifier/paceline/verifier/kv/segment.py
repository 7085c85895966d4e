"""One sequence's KV in one segment of memory that drafters can map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from paceline.kernels import LayerTable
from paceline.kv.segment import HEADER_BYTES
from paceline.verifier.kv.base import (
    HiddenStates,
    KvLayout,
    OutOfMemory,
    SequenceKv,
    TapLayout,
    TapRows,
    host_bytes,
)


class TapPlanes(TapRows):
    """Hidden states in a plane of ``[slots, hidden]`` per layer."""

    def __init__(self, layout: TapLayout, memory: Tensor) -> None:
        """View flat memory of the layout's type and size."""
        super().__init__(layout)
        # The planes, `[layers, slots, hidden]`.
        self.rows = memory.view(len(layout.taps.layers), layout.slots, layout.hidden)
        self._bytes = list(host_bytes(self.rows))

    def record(self, first: int, states: HiddenStates, rows: slice | list[int]) -> None:
        slots = self.layout.slots
        self.first = min(self.first, first)
        for plane, layer in zip(self._bytes, self.layout.taps.layers, strict=True):
            output = states[layer]
            new = (host_bytes(output) if isinstance(output, Tensor) else output)[rows]
            done = max(0, len(new) - slots)  # earlier rows would be overwritten at once
            while done < len(new):
                at = (first + done) % slots
                part = new[done : done + slots - at]
                plane[at : at + len(part)] = part
                done += len(part)

    def gather(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        slots = torch.arange(begin, end) % self.layout.slots
        kept = self.layout.taps.layers
        return [self.rows[kept.index(layer)].index_select(0, slots) for layer in layers]


class SegmentMemory:
    """Memory of all segments of a verifier, up to a limit. Segments take it in steps of 256 slots.

    Safety contract: only the engine thread takes memory and gives it back. Other threads may read
    the counts.
    """

    def __init__(self, layout: KvLayout, limit_bytes: int) -> None:
        self.layout = layout  # shape of the model's KV
        self.limit_bytes = limit_bytes  # maximum memory of all segments together. Unit: bytes.
        self.used_bytes = 0  # memory taken. Unit: bytes.

    def allocate(self, capacity: int, taps: TapLayout | None) -> Segment:
        """Make a segment, which has no memory yet; see :class:`Segment`."""
        return Segment(self, capacity, taps)

    def bytes_of(self, slots: int, taps: TapLayout | None) -> int:
        """Return the memory of so many slots and their states. Unit: bytes."""
        return self.layout.bytes_of(slots, taps)

    def take(self, byte_size: int) -> None:
        """Take memory. Raises ``OutOfMemory``: less is left."""
        if self.used_bytes + byte_size > self.limit_bytes:
            raise OutOfMemory(
                f"{self.used_bytes} of {self.limit_bytes} bytes of KV are in use, and {byte_size} "
                "more are needed; wait for other sequences to end"
            )
        self.used_bytes += byte_size

    def give_back(self, byte_size: int) -> None:
        self.used_bytes -= byte_size


class Segment(SequenceKv):
    """KV memory of one sequence: a sparse segment, mapped once, reserved in steps.

    It begins with a :class:`paceline.kv.segment.SegmentHeader`; the KV planes follow
    (KvLayout), and the planes of the hidden states, if any are kept (TapLayout).

    Safety contract, in addition to :class:`SequenceKv`'s:

    - Nothing may touch a slot before ``reserve()`` has given it memory: a write may end the
      process (SIGBUS).
    - Other processes that were given the descriptor may map it read-only and read positions
      below the header's committed length, which only grows; positions at or above it change at any
      time, and those beyond ``reserved`` have no memory. A mapping taken before ``close()`` stays
      valid memory afterwards and is never written again; the header's epoch becomes 0.
    - Readers cannot prevent a segment from being closed: its pages are freed with their last
      mapping.
    """

    def __init__(self, memory: SegmentMemory, capacity: int, taps: TapLayout | None = None) -> None:
        """Make a segment of so many slots, a multiple of 256. It has an address range, but memory
        for its header only. Raises ``OutOfMemory`` if it cannot be made or mapped."""
        layout = memory.layout
        kv_bytes = capacity * layout.token_bytes
        self._taps_offset = HEADER_BYTES + kv_bytes
        super().__init__(
            layout,
            capacity,
            kv_bytes + (0 if taps is None else taps.byte_size),
            taps=None if taps is None else taps.describe(offset=self._taps_offset),
        )
        self._memory = memory
        shape = (layout.layers, 2, layout.kv_heads, capacity, layout.row_width)
        # `[layers, 2, kv_heads, capacity, row_width]` over the mapping; 0 is keys, 1 values.
        self.kv: Tensor = self._body[:kv_bytes].view(layout.dtype).view(shape)
        if taps is not None:
            self.taps = TapPlanes(taps, self._body[kv_bytes:].view(taps.dtype))
        self._layers = [(layer[0], layer[1]) for layer in self.kv]
        self.table = LayerTable(self._layers)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each ``[kv_heads, capacity, head_dim]``."""
        return self._layers[index]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        return keys[:, positions], values[:, positions]

    def _take(self, slots: int) -> None:
        taken = self._bytes_of(slots) - self.reserved_bytes
        self._memory.take(taken)
        try:
            layout = self.layout
            planes = HEADER_BYTES, layout.planes, self.capacity, layout.row_bytes
            self._fill_planes(*planes, self.reserved, slots)
            if self.taps is not None:
                kept = self.taps.layout
                planes = self._taps_offset, len(kept.taps.layers), kept.slots, kept.row_bytes
                self._fill_planes(*planes, min(self.reserved, kept.slots), min(slots, kept.slots))
        except BaseException:
            self._memory.give_back(taken)
            raise
        self.reserved = slots

    def _fill_planes(
        self, offset: int, planes: int, slots: int, row_bytes: int, begin: int, end: int
    ) -> None:
        """Give memory to slots ``begin`` to ``end`` of planes with so many slots."""
        for plane in range(planes if begin < end else 0):
            start = offset + (plane * slots + begin) * row_bytes
            self._fill(start, (end - begin) * row_bytes, end - begin)

    def _copy_kv(self, source: Self, tokens: int) -> None:
        self.kv[..., :tokens, :].copy_(source.kv[..., :tokens, :])

    def compact(self, slots: list[int], start: int) -> None:
        moved = self.kv.index_select(3, torch.tensor(slots))
        self.kv[..., start : start + len(slots), :] = moved
        if self.states is not None:
            self.states.compact(slots, start)

    def close(self) -> None:
        """See :class:`SequenceKv`. Gives its memory back."""
        self._memory.give_back(self.reserved_bytes)
        super().close()
        self._layers = []
        self.table = None
        self.kv = torch.empty(0)
