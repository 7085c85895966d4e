"""Layouts of KV and hidden states (taps) in memory, and the interface of one sequence's memory."""

from __future__ import annotations

import errno
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.decoder import DecoderConfig
from paceline.kernels import DeltaShape, LayerTable, Plane, RecurrentStates
from paceline.kernels.caches import row_width
from paceline.kv.segment import HEADER_BYTES, TAP_MARGIN, SegmentHeader, new_segment
from paceline.kv.wire import cache_dtype
from paceline.v1 import kv_pb2

_COPIED_ROWS = 1024  # copied at once, so that little other memory is needed
# Memory is reserved, and capacities are rounded up, in steps of this many tokens.
RESERVED_TOKENS = 256

TREE_TOKENS = 256  # slots behind the longest text for the nodes of one tree, anchor included

# Outputs of tapped layers for the rows of a batch, `[M, hidden]` each, by layer; or their bytes on
# the CPU, see `host_bytes`.
HiddenStates = Mapping[int, Tensor | NDArray[np.uint8]]

_open_files: set[int] = set()


@dataclass(frozen=True)
class Taps:
    """The hidden states that a drafter reads."""

    layers: tuple[int, ...]  # layers whose outputs it reads, counted from 0, rising
    window: int = 0  # newest positions that are guaranteed to be kept; 0: all. Unit: tokens.


@dataclass(frozen=True)
class TapLayout:
    """What is kept: position p has slot p % slots."""

    taps: Taps  # the requested layers and window
    slots: int  # positions that are kept: the window and a margin, or the whole capacity
    hidden: int  # elements of a row
    dtype: torch.dtype  # type of the elements

    @classmethod
    def of(cls, taps: Taps, layout: KvLayout, capacity: int) -> TapLayout:
        """Return the layout for a cache of ``capacity`` slots."""
        slots = min(capacity, round_up(taps.window) + TAP_MARGIN) if taps.window else capacity
        return cls(taps, slots, layout.hidden, layout.hidden_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one position of one layer."""
        return self.hidden * self.dtype.itemsize

    @property
    def byte_size(self) -> int:
        """Bytes of all rows."""
        return self.rows_of(self.slots) * self.row_bytes

    def rows_of(self, tokens: int) -> int:
        """Return the number of rows of so many positions, in all layers."""
        return len(self.taps.layers) * min(tokens, self.slots)

    def describe(self, **where: int) -> kv_pb2.HiddenStateLayout:
        """Describe it to other processes; ``where`` are the fields of the place."""
        return kv_pb2.HiddenStateLayout(
            layers=self.taps.layers,
            hidden_size=self.hidden,
            slots=self.slots,
            dtype=cache_dtype(self.dtype),
            **where,
        )


class TapRows(ABC):
    """The hidden states of one cache. Written by the engine thread alone.

    Rows are written before the committed length that covers them is published, and overwrite those
    that are ``slots`` older: see :class:`paceline.kv.segment.SegmentHeader`.
    """

    ahead = 0  # rows that may be written before they are committed

    def __init__(self, layout: TapLayout) -> None:
        self.layout = layout  # their layout
        self.first = sys.maxsize  # first position that was ever written

    @abstractmethod
    def record(self, first: int, states: HiddenStates, rows: slice | list[int]) -> None:
        """Write the rows of positions from ``first`` on: these rows of the outputs of the layers,
        on the device of the rows, in order of positions."""

    @abstractmethod
    def gather(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        """Return copies of the rows ``begin`` to ``end``, ``[n, hidden]`` for each layer."""

    def copy(self, layers: Sequence[int], begin: int, end: int) -> list[Tensor]:
        """Return what :meth:`gather` does, on the CPU. For committed rows, from any thread."""
        return self.gather(layers, begin, end)

    def first_kept(self, committed: int) -> int:
        """Return the oldest position that is kept at a committed length."""
        return max(self.first, committed + self.ahead - self.layout.slots)

    def reusable(self, source: TapRows | None, committed: int, shared: int) -> int:
        """Return how many positions of a common prefix can be copied with their hidden states from
        another cache, by its hidden states and committed length.

        All ``shared`` ones if it has all rows of the window; else fewer, so that prefill computes
        the missing rows again.
        """
        taps = self.layout.taps
        needed = max(0, shared - taps.window) if taps.window else 0
        if source is None or not set(taps.layers) <= set(source.layout.taps.layers):
            return needed
        return shared if needed >= source.first_kept(committed) else needed

    def copy_prefix(self, source: TapRows, tokens: int, committed: int) -> None:
        """Copy the rows of the first ``tokens`` positions, or of the window, from another cache, by
        its committed length: as many as it has, of all layers or of none."""
        taps = self.layout.taps
        if not set(taps.layers) <= set(source.layout.taps.layers):
            return
        begin = max(0, tokens - taps.window) if taps.window else 0
        begin = max(begin, source.first_kept(committed))
        for first in range(begin, tokens, _COPIED_ROWS):
            copies = source.gather(taps.layers, first, min(tokens, first + _COPIED_ROWS))
            self.record(first, dict(zip(taps.layers, copies, strict=True)), slice(None))


def host_bytes(rows: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of rows on the CPU, in their memory: NumPy has no bfloat16, and copies a few
    short rows in a third of PyTorch's time."""
    raw: NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return raw


def round_up(tokens: int) -> int:
    """Return the next multiple of ``RESERVED_TOKENS``."""
    return -(-tokens // RESERVED_TOKENS) * RESERVED_TOKENS


@dataclass(frozen=True)
class KvLayout:
    """Shape of the KV of one model: planes of ``[capacity, row_width]`` by layer, kind and head.

    The planes are in the order ``[layers, 2 (keys, values), kv_heads]``, so that each of them is
    contiguous in tokens and one gather moves a path of all layers. The header precedes the first.
    """

    layers: int  # decoder layers that have keys and values
    kv_heads: int  # key/value heads per layer
    head_dim: int  # elements per head
    dtype: torch.dtype  # type of keys and values; int8 as in `caches`
    hidden: int = 0  # elements of a hidden state
    hidden_dtype: torch.dtype = torch.float32  # type of hidden states
    # Layers that have recurrent states instead; None if there are none.
    delta: DeltaShape | None = None
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, in tokens; empty: none

    @classmethod
    def of(cls, config: DecoderConfig) -> KvLayout:
        kv = config.kv_layers, config.kv_heads, config.head_dim, config.kv_dtype
        return cls(*kv, config.hidden, config.dtype, config.delta, config.kv_windows)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of a sequence: before a step, behind it, a snapshot."""
        return 0 if self.delta is None else 3 * self.delta.byte_size

    @property
    def planes(self) -> int:
        return self.layers * 2 * self.kv_heads

    @property
    def row_width(self) -> int:
        """Elements of one token in one plane."""
        return row_width(self.head_dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane."""
        return self.row_width * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return self.planes * self.row_bytes

    def capacity(self, text_tokens: int) -> int:
        """Return the slots for a text of up to ``text_tokens`` and one tree behind it."""
        return round_up(text_tokens) + TREE_TOKENS

    def bytes_of(self, slots: int, taps: TapLayout | None) -> int:
        """Return the memory of so many slots, their hidden and recurrent states. Unit: bytes."""
        rows = 0 if taps is None else taps.rows_of(slots) * taps.row_bytes
        return slots * self.token_bytes + rows + (self.state_bytes if slots else 0)


class OutOfMemory(Exception):
    """There is not enough memory for a reservation."""


class SequenceKv(ABC):
    """KV memory of one sequence, with a segment: header and body.

    The segment is a sealed memfd, mapped once, and its memory is reserved in steps. Subclasses
    define the contents of the body, and set ``taps``. Kernels read the KV as
    :class:`paceline.kernels.Plane`, other processes by the layout in the header.

    Safety contract:

    - Only the engine thread writes, and only below ``reserved``.
    - Only the engine thread frees (``close()``), between two steps, so that no forward pass runs
      over memory that is being freed.
    - Only the mapping of this process can be written. Others map the segment read-only.
    - ``file`` is the segment's descriptor, and -1 once it is closed.
    """

    device = torch.device("cpu")  # where the KV is
    row = 0  # of the page tables, if the KV lies in pages
    # Addresses of all layers for compiled programs; None: KV in pages.
    table: LayerTable | None = None
    taps: TapRows | None = None  # hidden states that are kept; None: none

    def __init__(
        self,
        layout: KvLayout,
        capacity: int,
        body_bytes: int,
        *,
        taps: kv_pb2.HiddenStateLayout | None,
        pages: kv_pb2.KvPages | None = None,
    ) -> None:
        """Make a segment. It has an address range, but memory for its header only.

        ``taps`` describes the hidden states that are kept, ``pages`` the pool of the KV's pages;
        without it the KV is in the body. Raises ``OutOfMemory`` if it cannot be made or mapped.
        """
        self.layout = layout  # shape of the model's KV
        self.capacity = capacity  # slots. Unit: tokens.
        self.reserved = 0  # slots that have memory. Unit: tokens.
        # Recurrent states, in memory that only this process has; None: the model has none.
        self.states = None if layout.delta is None else RecurrentStates(layout.delta)
        self.file_bytes = HEADER_BYTES + body_bytes  # the segment's size. Unit: bytes.
        try:
            self.file, mapping = new_segment(self.file_bytes)
        except (OSError, ValueError) as error:
            raise OutOfMemory(f"cannot map {self.file_bytes} bytes of KV: {error}") from error
        _open_files.add(self.file)
        # The segment's header, for readers in other processes; unusable once closed.
        self.header = SegmentHeader(mapping)
        self.header.describe(
            kv_pb2.SegmentLayout(
                layers=layout.layers,
                heads=layout.kv_heads,
                head_dim=layout.head_dim,
                dtype=cache_dtype(layout.dtype),
                capacity=capacity,
                pages=pages,
                hidden_states=taps,
            )
        )
        self._body: Tensor = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES)

    @abstractmethod
    def layer(self, index: int) -> tuple[Plane, Plane]:
        """Return keys and values of a layer, each ``[kv_heads, capacity, head_dim]``
        (int8 as in :mod:`paceline.kernels.caches`)."""

    @abstractmethod
    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values of a layer at positions, int64 ``[n]`` on the CPU, to the CPU: each
        ``[kv_heads, n, head_dim]`` (int8 with its scales)."""

    def reserve(self, tokens: int) -> None:
        """Give memory to the first ``tokens`` slots, rounded up to steps of 256. Raises
        ``OutOfMemory``: there is not enough. What was reserved before stays reserved."""
        if tokens > self.reserved:
            self._take(min(round_up(tokens), self.capacity))

    @abstractmethod
    def _take(self, slots: int) -> None:
        """Take the memory that is missing for so many slots."""

    @property
    def reserved_bytes(self) -> int:
        """Memory of the reserved slots and their hidden states. Unit: bytes."""
        return self._bytes_of(self.reserved)

    def _bytes_of(self, slots: int) -> int:
        return self.layout.bytes_of(slots, None if self.taps is None else self.taps.layout)

    def copy_prefix(self, source: Self, tokens: int, committed: int) -> None:
        """Take over the first ``tokens`` positions of another cache of the same class and layout,
        which has ``committed``. Raises ``OutOfMemory`` if there is not enough memory for them."""
        self.reserve(tokens)
        self._copy_kv(source, tokens)
        if self.states is not None and source.states is not None:
            self.states.copy_prefix(source.states, tokens)
        if tokens and self.taps is not None and source.taps is not None:
            self.taps.copy_prefix(source.taps, tokens, committed)

    @abstractmethod
    def _copy_kv(self, source: Self, tokens: int) -> None:
        """Copy keys and values."""

    @abstractmethod
    def compact(self, slots: list[int], start: int) -> None:
        """Move the KV at ``slots`` to ``start``, ``start + 1``, ...; none moves to a later slot."""

    @property
    def files(self) -> list[int]:
        """Descriptors for readers in other processes: of the segment, and of memory on a GPU."""
        return [self.file]

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.file < 0

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
        self.taps = self.states = None

    def _fill(self, start: int, byte_size: int, tokens: int) -> None:
        """Give memory to a part of the segment; ``tokens`` is for the error message. Raises
        ``OutOfMemory``: the kernel has none."""
        try:
            os.posix_fallocate(self.file, start, byte_size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise OutOfMemory(
                f"there is no memory for {tokens} more tokens of KV: {error.strerror}; wait for "
                "other sequences to end"
            ) from error


def open_segments() -> set[int]:
    """Return the descriptors of all segments of this process that are not closed."""
    return set(_open_files)
