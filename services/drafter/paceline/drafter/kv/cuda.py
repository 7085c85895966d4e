"""KV and hidden states on a GPU, mapped."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.device import Device, NotMappable
from paceline.drafter.kv import KvGone, KvNotShared
from paceline.drafter.kv.mapped import CacheFile, MappedReader, oldest_kept
from paceline.drafter.kv.reader import KvPages, KvReader, StateReader, StateSlice
from paceline.kernels import SINKS, send, streaming
from paceline.kv.segment import HEADER_BYTES
from paceline.kv.selection import streaming_positions

_NO_PAGES = np.empty(0, np.int32)


class PoolReader(MappedReader):
    """Reads pages of the verifier's pool.

    A process maps the pool once. The committed length and the page tables are in the cache's file,
    which is mapped too, so that no call to the verifier is needed.

    Safety contract:

    - What is returned are copies, made by the GPU that reads, on it; or addresses, for kernels of
      the same stream.
    - Pages of a released cache are reused. So call :meth:`check` after the GPU has read, before
      using what was read, such as after the host has got the results; or :meth:`settle`, which
      waits for the GPU.
    - The mapping gives access to the whole pool. Drafters that are not trusted with it have to
      follow the cache over gRPC, as another user or on another machine.
    - If the verifier dies during a copy from memory that was opened by a handle of CUDA IPC, CUDA
      may fail for this process permanently. The end of its connection closes the sequences that
      read its pool.
    """

    def __init__(self, file: CacheFile, device: Device) -> None:
        """Map the verifier's pool, for the device that reads. Raises ``KvNotShared`` if the layout
        is invalid, or this device cannot read the pool."""
        super().__init__(file)
        if not file.layout.pages.HasField("memory"):
            raise KvNotShared("the verifier's KV lies in pages that other processes cannot map")
        memory = file.layout.pages.memory
        self._page = _page_shape(file)
        page_bytes = math.prod(self._page) * file.kv_dtype.itemsize
        count = memory.byte_size // page_bytes if page_bytes else 0
        if not count or memory.byte_offset % 16:
            raise KvNotShared(
                f"the verifier's pool has {memory.byte_size} bytes from byte "
                f"{memory.byte_offset}, expected whole pages of {page_bytes} bytes"
            )
        try:
            self._pool = device.map_memory(
                memory.device_uuid, memory.handle, memory.byte_offset, memory.byte_size, file.pool
            )
        except NotMappable as error:
            raise KvNotShared(str(error)) from error
        self._wait = device.wait
        # The pages, uint8 `[pages, page_bytes]`.
        self._memory = self._pool.bytes[: count * page_bytes].view(count, page_bytes)
        self._table: NDArray[np.int32] = _NO_PAGES

    def settle(self) -> None:
        if not self.closed:
            self._wait()
        self.check()

    def close(self) -> None:
        """Unmap the file and the pool. Closing twice is safe."""
        self._memory = torch.empty(0)
        self._table = _NO_PAGES
        super().close()
        self._pool.close()

    def _places(self, rows: NDArray[np.int64], size: int) -> tuple[Tensor, Tensor]:
        """Return page and row in the page of rows in pages of ``size``, on the device that reads.
        Raises ``KvGone`` as :meth:`_checked`."""
        pages = self._checked(self._table[rows // size].astype(np.int64))
        both = torch.from_numpy(np.stack([pages, rows % size]))
        page, row = send(both, self._memory.device)
        return page, row

    def _checked(self, pages: NDArray[Any]) -> NDArray[Any]:
        """Return entries of the page table. Raises ``KvGone`` if one is not a page of the pool."""
        if len(pages) and not 0 <= pages.min() <= pages.max() < len(self._memory):
            raise KvGone("the verifier's page table leads out of its pool")
        return pages


def _page_shape(file: CacheFile) -> tuple[int, int, int, int, int]:
    """Return the shape of a page: ``[layers, 2 (keys, values), Hkv, page_size, D]``."""
    layout = file.layout
    return layout.layers, 2, layout.heads, layout.pages.page_size, layout.head_dim


class CudaKv(PoolReader, KvReader):
    """K and V of some layers in the pages of the verifier's pool."""

    def __init__(self, file: CacheFile, layers: Iterable[int], device: Device) -> None:
        """Map the verifier's pool, for the device that reads. Negative layers count from the last.
        Raises ``KvNotShared`` as :class:`PoolReader`, or if the target has no such layers."""
        layout, size = file.layout, file.layout.pages.page_size
        self._selection = 0, 0
        self._selected: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        self._numbers = file.numbers(layers)
        self.layers = tuple(self._numbers)
        entries = layout.capacity // max(1, size)
        table = file.array(HEADER_BYTES, (entries,), torch.int32)
        super().__init__(file, device)
        self._table = table.numpy()
        # `[pages, layers, 2, Hkv, page_size, D]`.
        self._pages = self._memory.view(file.kv_dtype).view(-1, *self._page)

    def refresh(self, below: int, budget: int) -> int:
        """See :class:`KvReader`. The policy is ``streaming``."""
        self.check()
        length = min(self.committed, below)
        self._selection = length, budget
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """See :class:`KvReader`. Raises ``KvGone`` too: the page table is invalid."""
        if self._selected is None or self._selected[0] != self._selection:
            places = self._places(streaming_positions(*self._selection).numpy(), self._page[3])
            self._selected = self._selection, places
        if not len(self._selected[1][0]):
            return []
        return [self._copy(layer, *self._selected[1])]

    def pages(self, layer: int) -> KvPages | None:
        length, budget = self._selection
        size, ranges = self._page[3], streaming(length, budget)
        if not ranges or ranges[0].start or size < SINKS:
            return None
        first = ranges[1].start if len(ranges) > 1 else SINKS
        table = self._table
        newest = table[first // size : -(-length // size)] if length > SINKS else table[:0]
        number = self._numbers[layer]
        layers, _, heads, _, dim = self._page
        page_bytes = self._memory.shape[1]
        return KvPages(
            self._pages.dtype,
            (heads, size, dim),
            self._memory.data_ptr() + number * (page_bytes // layers),
            page_bytes,
            sum(map(len, ranges)),
            first,
            self._checked(np.concatenate([table[:1], newest])),
        )

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values at positions, each ``[Hkv, n, D]``, on the GPU; these
        are int64 ``[n]`` on the CPU, all below :attr:`committed`. Raises ``KvGone`` if the page
        table is invalid."""
        return self._copy(layer, *self._places(positions.numpy(), self._page[3]))

    def close(self) -> None:
        self._selected = None
        self._pages = torch.empty(0)
        super().close()

    def _copy(self, layer: int, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        stored = self._pages[:, self._numbers[layer]]
        keys, values = (stored[pages, kind, :, offsets].transpose(0, 1) for kind in (0, 1))
        return keys, values


class CudaStates(PoolReader, StateReader):
    """Hidden states of some layers in the pages of the verifier's pool.

    They lie in a ring, as in :class:`SharedStates`. :meth:`read` does not wait for its copies;
    :meth:`check` fails if rows may have been overwritten since they were asked for.
    """

    paged = True

    def __init__(self, file: CacheFile, layers: Sequence[int], window: int, device: Device) -> None:
        """Map the verifier's pool, for the device that reads.

        Layers are counted from 0, in the order in which they are read. The newest ``window``
        positions are read; 0: all. Raises ``KvNotShared`` as :class:`PoolReader`, or if the cache
        does not keep these states.
        """
        kept, dtype = file.kept_states(layers, window)
        row_bytes = kept.hidden_size * dtype.itemsize
        page = math.prod(_page_shape(file)) * file.kv_dtype.itemsize
        rows = page // row_bytes if row_bytes else 0
        if not rows or page % dtype.itemsize:
            raise KvNotShared(f"a page of {page} bytes has no hidden states of {row_bytes} bytes")
        entries = -(-kept.slots * len(kept.layers) // rows)
        table = file.array(kept.table_offset, (entries,), torch.int32)
        super().__init__(file, device)
        self._table = table.numpy()
        stored = self._memory.view(dtype)[:, : rows * kept.hidden_size]
        self._rows = stored.view(len(stored), rows, kept.hidden_size)  # ``[pages, rows, hidden]``
        self._kept = len(kept.layers)
        self._indices = np.array([list(kept.layers).index(layer) for layer in layers])
        self._slots, self._window = kept.slots, window
        self._unchecked = sys.maxsize  # oldest position that was read since the last check

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """See :class:`StateReader`; on the GPU. Raises ``KvGone`` if the page table is invalid."""
        begin = self._available(begin, end)
        pages, at = self._places(self._rows_of(begin, end).ravel(), self._rows.shape[1])
        width = len(self._indices) * self._rows.shape[2]
        return begin, self._rows[pages, at].view(end - begin, width)

    def slice(self, begin: int, end: int) -> StateSlice:
        """See :class:`StateReader`. Raises ``KvGone`` if the page table is invalid."""
        first, size = self._available(begin, end), self._rows.shape[1]
        rows = self._rows_of(first, end)
        pages = self._checked(self._table[rows // size].astype(np.int64))
        addresses = self._rows.data_ptr() + pages * self._memory.shape[1]
        addresses += rows % size * (self._rows.shape[2] * self._rows.element_size())

        def read() -> Tensor:
            at, states = self.read(first, end)
            if at > first:
                raise KvGone("the verifier has overwritten hidden states that were to be read")
            return states

        return StateSlice(first, read, addresses, self._rows.dtype)

    def _rows_of(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the numbers of the rows of positions, ``[end - begin, layers]``."""
        slots = np.arange(begin, end) % self._slots
        rows: NDArray[np.int64] = slots[:, None] * self._kept + self._indices
        return rows

    def _available(self, begin: int, end: int) -> int:
        """Return the first position from ``begin`` on that is still kept, and notes that it is
        read."""
        first = min(end, max(begin, oldest_kept(self.committed, self._window, self._slots)))
        self._unchecked = min(self._unchecked, first)
        return first

    def check(self) -> None:
        """See :class:`PoolReader`. Raises ``KvGone`` too if rows may have been overwritten while
        they were copied."""
        super().check()
        oldest, self._unchecked = self._unchecked, sys.maxsize
        if oldest < oldest_kept(self.committed, 0, self._slots):
            raise KvGone("the verifier has overwritten hidden states while they were read")

    def close(self) -> None:
        self._rows = torch.empty(0)
        super().close()
