"""KV and hidden states in the verifier's memory, mapped read-only."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.drafter.kv import KvGone, KvNotShared
from paceline.drafter.kv.reader import CacheReader, StateReader, StreamingReader
from paceline.kernels.caches import from_rows, row_width
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD, SegmentHeader, map_segment
from paceline.kv.wire import KV_TYPES, STATE_TYPES
from paceline.v1 import kv_pb2


class CacheFile:
    """The segment of a cache, mapped read-only.

    Its seals keep the verifier from taking memory away. The header has the layout; every array of
    it must lie in the segment.

    Safety contract (see :class:`paceline.kv.segment.SegmentHeader` for the writer's side):

    - Read positions below :attr:`committed` only. They never change. Those at or above it change at
      any time, and reading far above may allocate memory, or end the process (SIGBUS).
    - Never write: the pages are mapped read-only, but torch does not enforce it: a write ends
      the process (SIGSEGV). So pass the tensors to no in-place operation.
    - Tensors keep the mapping alive: they may outlive :meth:`close`, and keep the memory.
    """

    def __init__(self, file: int, pool: int = -1) -> None:
        """Map a segment by the descriptor that the verifier passed, which is closed here in any
        case; ``pool`` is the descriptor of a pool on a GPU, closed with the mapping; -1: none.
        Raises ``KvNotShared`` if it is not the segment of an open cache."""
        self.pool = pool  # descriptor of the pool on a GPU; -1: there is none
        # Also if nobody waits for this mapping any more.
        self._close_pool = weakref.finalize(self, os.close, pool) if pool >= 0 else None
        self.closed = False  # whether :meth:`close` was called
        try:
            self._memory = map_segment(file)
            self._header = SegmentHeader(self._memory)
            self._epoch = self._header.epoch
            if not self._header.valid or not self._epoch:
                raise KvNotShared("what the verifier passed is not, or no longer, an open cache")
            # What lies where in the segment.
            self.layout: kv_pb2.SegmentLayout = self._header.layout
        except (OSError, ValueError) as error:
            raise KvNotShared(f"cannot map what the verifier passed: {error}") from error
        finally:
            os.close(file)

    @property
    def committed(self) -> int:
        """Committed length now, without a call to the verifier. Unit: tokens. Raises ``KvGone``:
        the mapping was closed."""
        self._check_open()
        return min(self._header.committed, self.layout.capacity)

    def check(self) -> None:
        """Check that the cache still exists, by its header.

        The memory keeps its contents after a release or the end of the verifier, so what was read
        before a failing check is useless, but never another cache's. That the verifier has ended is
        seen at its connection, whose sequences are closed then. Raises ``KvGone`` if the verifier
        released the cache, or the mapping was closed.
        """
        self._check_open()
        if self._header.epoch != self._epoch:
            raise KvGone("the verifier released the cache")

    def close(self) -> None:
        """Drop the mapping. Closing twice is safe."""
        if not self.closed:
            self.closed = True
            self._header.release()
            if self._close_pool is not None:
                self._close_pool()
            del self._memory

    def array(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a dense array that begins at a byte of the file, read-only. Raises ``KvNotShared``
        if it is empty, or does not lie in the file."""
        count = math.prod(shape)
        end = offset + count * dtype.itemsize
        if not count or offset < HEADER_BYTES or offset % dtype.itemsize or end > len(self._memory):
            raise KvNotShared(
                f"the verifier's cache has an array {list(shape)} from byte {offset} to {end}, "
                f"expected one inside bytes {HEADER_BYTES} to {len(self._memory)} of its file"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        return flat.view(*shape)

    def numbers(self, layers: Iterable[int]) -> dict[int, int]:
        """Return the number of each layer of keys and values, as counted from 0. Raises
        ``KvNotShared`` if the target has no such layer."""
        count = self.layout.layers
        numbers = {layer: layer + count if layer < 0 else layer for layer in layers}
        for layer, number in numbers.items():
            if not 0 <= number < count:
                raise KvNotShared(
                    f"the drafter reads layer {layer}, but the target has {count}; was the drafter "
                    "made for another target?"
                )
        return numbers

    @property
    def paged(self) -> bool:
        """Whether keys, values and hidden states lie in pages of a pool."""
        return self.layout.HasField("pages")

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of keys and values. Raises ``KvNotShared`` if it is unknown."""
        return _dtype(self.layout.dtype, KV_TYPES)

    def kept_states(
        self, layers: Sequence[int], window: int
    ) -> tuple[kv_pb2.HiddenStateLayout, torch.dtype]:
        """Return the layout and the type of the hidden states.

        Raises:
            KvNotShared: Those of a layer, or of so many newest positions, are not kept.
        """
        kept = self.layout.hidden_states
        if missing := sorted(set(layers) - set(kept.layers)):
            raise KvNotShared(
                f"the drafter reads hidden states of layers {missing}, but the cache keeps those "
                f"of {list(kept.layers)}"
            )
        if kept.slots < window + TAP_AHEAD:
            raise KvNotShared(
                f"the verifier keeps {kept.slots} hidden states, expected at least "
                f"{window + TAP_AHEAD}"
            )
        return kept, _dtype(kept.dtype, STATE_TYPES)

    def _check_open(self) -> None:
        if self.closed:
            raise KvGone("this mapping was closed")


class MappedReader(CacheReader):
    """Reads a cache by its mapped file, which it owns; for the safety contract see
    :class:`CacheFile`."""

    def __init__(self, file: CacheFile) -> None:
        self._file = file

    @property
    def closed(self) -> bool:
        return self._file.closed

    @property
    def committed(self) -> int:
        return self._file.committed

    def check(self) -> None:
        self._file.check()

    def close(self) -> None:
        """Unmap the file. Closing twice is safe."""
        self._file.close()


class SharedKv(MappedReader, StreamingReader):
    """K and V of some layers in the verifier's own memory."""

    def __init__(self, file: CacheFile, layers: Iterable[int]) -> None:
        """Read a file.

        Negative layers count from the last. Raises ``KvNotShared``: the target has no such layers,
        or the layout is invalid.
        """
        super().__init__(file)
        layout, numbers = file.layout, file.numbers(layers)
        width = row_width(layout.head_dim, file.kv_dtype)
        shape = (layout.layers, 2, layout.heads, layout.capacity, width)
        stored = file.array(HEADER_BYTES, shape, file.kv_dtype)
        self.layers = tuple(numbers)
        self._views = {layer: (stored[n, 0], stored[n, 1]) for layer, n in numbers.items()}

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys (after RoPE) and values of a layer on the CPU, each ``[heads, capacity,
        head_dim]``, last dimension dense; int8 as in :mod:`paceline.kernels.caches`. Raises
        ``KeyError``: the layer was not mapped, or the mapping was closed."""
        return self._views[index]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values at positions, each ``[Hkv, n, D]``.

        Positions are int64 ``[n]`` on the CPU, all below :attr:`committed`.
        """
        keys, values = self._views[layer]
        return (
            from_rows(keys.index_select(1, positions)),
            from_rows(values.index_select(1, positions)),
        )

    def close(self) -> None:
        self._views = {}
        super().close()


class SharedStates(MappedReader, StateReader):
    """Hidden states of some layers in the verifier's own memory.

    Each layer has a ring: position p lies in slot ``p % slots``. :meth:`read` copies, and drops
    rows that may have been overwritten during the copy (see
    :class:`paceline.kv.segment.SegmentHeader`).
    """

    def __init__(self, file: CacheFile, layers: Sequence[int], window: int) -> None:
        """Read a file.

        Layers are counted from 0, in the order in which they are read. The newest ``window``
        positions are read; 0: all. Raises ``KvNotShared``: the cache does not keep these states, or
        the layout is invalid.
        """
        super().__init__(file)
        kept, dtype = file.kept_states(layers, window)
        stored = file.array(kept.offset, (len(kept.layers), kept.slots, kept.hidden_size), dtype)
        self._window = window
        self._slots = kept.slots
        self._rings = [stored[list(kept.layers).index(layer)] for layer in layers]

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        begin = min(end, max(begin, oldest_kept(self.committed, self._window, self._slots)))
        at, count = begin % self._slots, end - begin
        head = min(count, self._slots - at)
        parts = [torch.cat([ring[at : at + head] for ring in self._rings], dim=1)]
        if head < count:  # the ring's beginning follows its end
            parts.append(torch.cat([ring[: count - head] for ring in self._rings], dim=1))
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Rows may have been overwritten while they were copied.
        first = min(end, max(begin, oldest_kept(self.committed, self._window, self._slots)))
        return first, states[first - begin :]

    def close(self) -> None:
        self._rings = []
        super().close()


def oldest_kept(committed: int, window: int, slots: int) -> int:
    """Return the oldest position to read whose row cannot be overwritten at a committed length.

    ``window`` is the drafter's, 0: all; the verifier keeps ``slots`` positions. Unit: tokens.
    """
    return max(committed - window if window else 0, committed + TAP_AHEAD - slots, 0)


def _dtype(number: kv_pb2.KvDtype, known: Mapping[kv_pb2.KvDtype, torch.dtype]) -> torch.dtype:
    """Return the torch type of a number in a layout. Raises ``KvNotShared`` if it is not one of
    those known."""
    if number not in known:
        raise KvNotShared(
            f"the verifier's cache has the type number {number}, expected one of {sorted(known)}"
        )
    return known[number]
