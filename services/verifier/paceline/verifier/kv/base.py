"""Interface of one sequence's KV memory, and the segment that other processes map."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from paceline.kernels import LayerTable, Plane
from paceline.kv.segment import HEADER_BYTES, SegmentHeader, new_segment
from paceline.kv.wire import cache_dtype
from paceline.v1 import kv_pb2
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.taps import TapLayout, TapPlanes

_open_files: set[int] = set()


class OutOfMemory(Exception):
    """There is not enough memory for a reservation."""


class SequenceKv(ABC):
    """KV memory of one sequence, with a segment: header, body and hidden states.

    The segment is a sealed memfd, mapped once, and its memory is reserved in steps. Subclasses
    define the contents of the body. Kernels read the KV as :class:`paceline.kernels.Plane`, other
    processes by the layout in the header.

    Safety contract:

    - Only the engine thread writes, and only below ``reserved``.
    - Only the engine thread frees (``close()``), between two steps, so that no forward pass runs
      over memory that is being freed.
    - Only the mapping of this process can be written. Others map the segment read-only.

    Attributes:
        layout: Shape of the model's KV.
        capacity: Slots. Unit: tokens.
        reserved: Slots that have memory. Unit: tokens.
        device: Where the KV is.
        file: The segment's descriptor; -1 once closed.
        file_bytes: The segment's size. Unit: bytes.
        taps: Hidden states that are kept; None: none.
        header: The segment's header, for readers in other processes; unusable once closed.
        table: Addresses of all layers for compiled programs; None: KV in pages.
    """

    device = torch.device("cpu")
    table: LayerTable | None = None

    def __init__(
        self,
        layout: KvLayout,
        capacity: int,
        body_bytes: int,
        taps: TapLayout | None,
        pages: kv_pb2.KvPages | None = None,
    ) -> None:
        """Make a segment. It has an address range, but memory for its header only.

        Args:
            layout: Shape of the model's KV.
            capacity: Slots.
            body_bytes: Size of the body, between header and hidden states, a multiple of an
                element's size in both.
            taps: Layout of the hidden states; None: none are kept.
            pages: The pool of the KV's pages; None: the KV is in the body.

        Raises:
            OutOfMemory: It cannot be made or mapped.
        """
        self.layout = layout
        self.capacity = capacity
        self.reserved = 0
        self._taps_offset = HEADER_BYTES + body_bytes
        self.file_bytes = self._taps_offset + (0 if taps is None else taps.byte_size)
        try:
            self.file, mapping = new_segment(self.file_bytes)
        except (OSError, ValueError) as error:
            raise OutOfMemory(f"cannot map {self.file_bytes} bytes of KV: {error}") from error
        _open_files.add(self.file)
        self.header = SegmentHeader(mapping)
        self.header.describe(self._describe(taps, pages))
        memory = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES)
        self._body: Tensor = memory[:body_bytes]
        self.taps: TapPlanes | None = None
        if taps is not None:
            self.taps = TapPlanes(taps, memory[body_bytes:].view(taps.dtype))

    @abstractmethod
    def layer(self, index: int) -> tuple[Plane, Plane]:
        """Returns keys and values of a layer, each ``[kv_heads, capacity, head_dim]``
        (int8 as in :mod:`paceline.kernels.caches`)."""

    @abstractmethod
    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values of some positions to the CPU.

        Args:
            layer: Counted from 0.
            positions: int64 ``[n]`` on the CPU.

        Returns:
            Each ``[kv_heads, n, head_dim]`` (int8 with its scales).
        """

    @abstractmethod
    def reserve(self, tokens: int) -> None:
        """Give memory to the first ``tokens`` slots, rounded up to steps of 256.

        Raises:
            OutOfMemory: There is not enough. What was reserved before stays reserved.
        """

    @property
    def reserved_bytes(self) -> int:
        """Memory of the reserved slots and their hidden states. Unit: bytes."""
        return self._bytes_of(self.reserved)

    def _bytes_of(self, slots: int) -> int:
        """Memory of so many slots and their hidden states. Unit: bytes."""
        taps = 0 if self.taps is None else self.taps.layout.bytes_of(slots)
        return slots * self.layout.token_bytes + taps

    def copy_prefix(self, source: Self, tokens: int) -> None:
        """Take over the first ``tokens`` positions of another cache of the same class and layout.

        Raises:
            OutOfMemory: There is not enough memory for them.
        """
        self.reserve(tokens)
        self._copy_kv(source, tokens)
        if tokens and self.taps is not None and source.taps is not None:
            self.taps.copy_prefix(source.taps, tokens)

    @abstractmethod
    def _copy_kv(self, source: Self, tokens: int) -> None:
        """Copy keys and values."""

    @abstractmethod
    def keep(self, slots: list[int], start: int) -> None:
        """Move the KV at ``slots`` to ``start``, ``start + 1``, ...; none moves to a later slot."""

    def together(self) -> AbstractContextManager[object]:
        """A context in which what many sequences keep and publish is done at its end, at once."""
        return nullcontext()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.file < 0

    def _describe(
        self, taps: TapLayout | None, pages: kv_pb2.KvPages | None
    ) -> kv_pb2.SegmentLayout:
        layout = self.layout
        described = kv_pb2.SegmentLayout(
            layers=layout.layers,
            heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=cache_dtype(layout.dtype),
            capacity=self.capacity,
            pages=pages,
        )
        if taps is not None:
            described.hidden_states.CopyFrom(
                kv_pb2.HiddenStateLayout(
                    layers=taps.taps.layers,
                    hidden_size=taps.hidden,
                    slots=taps.slots,
                    offset=self._taps_offset,
                    dtype=cache_dtype(taps.dtype),
                )
            )
        return described

    def publish(self, committed: int) -> None:
        """Publish the committed length, after its KV was written. Unit: tokens."""
        if not self.closed:
            self.header.commit(committed)

    def close(self) -> None:
        """Close the segment and drop the memory. Closing twice is safe.

        The mapping lives as long as a tensor over it, so a view never points to unmapped memory.
        """
        if self.closed:
            return
        self.header.close()
        self.header.release()
        _open_files.remove(self.file)
        os.close(self.file)
        self.file = -1
        self.reserved = 0
        self._body = torch.empty(0)
        self.taps = None

    def _fill(self, start: int, byte_size: int, tokens: int) -> None:
        """Give memory to a part of the segment; ``tokens`` is for the error message.

        Raises:
            OutOfMemory: The kernel has none.
        """
        try:
            os.posix_fallocate(self.file, start, byte_size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise OutOfMemory(
                f"there is no memory for {tokens} more tokens of KV: {error.strerror}; wait for "
                "other sequences to end"
            ) from error

    def _fill_taps(self, done: int, goal: int) -> None:
        """Give memory to the hidden states of positions ``done`` to ``goal``, if any are kept."""
        if self.taps is None:
            return
        layout = self.taps.layout
        done, goal = min(done, layout.slots), min(goal, layout.slots)
        for plane in range(len(layout.taps.layers) if done < goal else 0):
            start = self._taps_offset + plane * layout.plane_bytes + done * layout.row_bytes
            self._fill(start, (goal - done) * layout.row_bytes, goal - done)


def open_segments() -> set[int]:
    """Returns the descriptors of all segments of this process that are not closed."""
    return set(_open_files)
