"""KV on a GPU, mapped."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.drafter.kv import KvGone, KvNotShared
from paceline.drafter.kv.mapped import CacheFile, MappedReader, SharedKv
from paceline.drafter.kv.reader import KvReader
from paceline.kv.cuda import (
    CudaDriver,
    DriverError,
    MappedMemory,
    NotMappable,
    close_unused,
    cuda_driver,
)
from paceline.kv.segment import HEADER_BYTES
from paceline.kv.selection import streaming_positions

__all__ = ["CudaKv", "close_unused", "open_kv"]


class CudaKv(MappedReader, KvReader):
    """K and V of some layers in the pages of the verifier's pool.

    A process maps the pool once. The committed length and the page table are in the cache's file,
    which is mapped too, so that no call to the verifier is needed.

    Safety contract:

    - :meth:`parts` returns copies, made on the pool's GPU.
    - Pages of a released cache are reused. So call :meth:`check` after reading, before using what
      was read: it waits for the copies, and checks that the cache still exists.
    - The mapping gives access to the whole pool. Drafters that are not trusted with it have to
      follow the cache over gRPC, as another user or on another machine.
    - If the verifier dies during a copy from memory that was opened by a handle of CUDA IPC, CUDA
      may fail for this process permanently. The end of its connection closes the sequences that
      read its pool.
    """

    def __init__(
        self,
        file: CacheFile,
        layers: Iterable[int],
        driver: CudaDriver,
        reader: int,
    ) -> None:
        """Map the verifier's pool.

        Negative layers count from the last; ``reader`` is the ordinal of the device that reads.

        Raises:
            KvNotShared: The target has no such layers, the layout is invalid, or this device cannot
                read the pool.
        """
        super().__init__(file)
        self._selected: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        layout, size, memory = file.layout, file.layout.pages.page_size, file.layout.pages.memory
        dtype = file.kv_dtype
        self._numbers = file.numbers(layers)
        self.layers = tuple(self._numbers)
        self._table = file.array(HEADER_BYTES, (layout.capacity // max(1, size),), torch.int32)
        page = (layout.layers, 2, layout.heads, size, layout.head_dim)
        page_bytes = math.prod(page) * dtype.itemsize
        count = memory.byte_size // page_bytes if page_bytes else 0
        if not count or memory.byte_offset % 16:
            raise KvNotShared(
                f"the verifier's pool has {memory.byte_size} bytes from byte "
                f"{memory.byte_offset}, expected whole pages of {page_bytes} bytes"
            )
        try:
            self._pool = MappedMemory(
                driver, reader, memory.device_uuid, memory.handle,
                memory.byte_offset, memory.byte_size, file.pool,
            )  # fmt: skip
        except NotMappable as error:
            raise KvNotShared(str(error)) from error
        stored = self._pool.bytes[: count * page_bytes].view(dtype)
        self._pages = stored.view(count, *page)
        """``[pages, layers, 2, Hkv, page_size, D]``."""
        entries = layout.capacity // size
        self.byte_size = len(self.layers) * entries * page_bytes // layout.layers

    def refresh(self, below: int, budget: int) -> int:
        """See :class:`KvReader`. The policy is ``streaming``."""
        super().check()
        length = min(self.committed, below)
        if self._selected is None or self._selected[0] != (length, budget):
            self._selected = (length, budget), self._slots(streaming_positions(length, budget))
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        if self._selected is None or not len(self._selected[1][0]):
            return []
        return [self._copy(layer, *self._selected[1])]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of keys and values at positions, each ``[Hkv, n, D]``, on the GPU.

        Positions are int64 ``[n]`` on the CPU, all below :attr:`committed`.

        Raises:
            KvGone: The page table is invalid.
        """
        return self._copy(layer, *self._slots(positions))

    def check(self) -> None:
        """See :class:`MappedReader`. Waits for the copies first.

        Raises:
            KvGone: The verifier released the cache or has ended, or the mapping was closed.
        """
        if not self.closed and self._pool.bytes.device.type == "cuda":
            torch.cuda.current_stream(self._pool.bytes.device).synchronize()
        super().check()

    def close(self) -> None:
        """Unmap the file and the pool. Closing twice is safe."""
        self._selected = None
        self._pages = torch.empty(0)
        self._table = torch.empty(0)
        super().close()
        self._pool.close()

    def _slots(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns page and offset in the page of each position, on the pool's device.

        Raises:
            KvGone: An entry of the page table is not a page of the pool.
        """
        size = self._pages.shape[4]
        pages = self._table[positions // size].long()
        if not bool(((pages >= 0) & (pages < len(self._pages))).all()):
            raise KvGone("the verifier's page table leads out of its pool")
        slots = torch.stack([pages, positions % size])
        pages, offsets = slots.to(self._pages.device)
        return pages, offsets

    def _copy(self, layer: int, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        stored = self._pages[:, self._numbers[layer]]
        keys, values = (stored[pages, kind, :, offsets].transpose(0, 1) for kind in (0, 1))
        return keys, values


def open_kv(file: CacheFile, layers: Iterable[int], device: str) -> SharedKv | CudaKv:
    """Map KV in main memory, or on a GPU for a drafter that runs on ``device``, by its torch name.

    Negative layers count from the last.

    Raises:
        KvNotShared: See :class:`SharedKv` and :class:`CudaKv`, or the KV is on
            a GPU and the drafter is not.
    """
    pages = file.layout.pages
    if not file.layout.HasField("pages"):
        return SharedKv(file, layers)
    reader = torch.device(device)
    if not pages.HasField("memory"):
        raise KvNotShared("the verifier's KV lies in pages that other processes cannot map")
    if reader.type != "cuda":
        raise KvNotShared(
            f"the verifier's KV is on a GPU, and this drafter runs on {reader}; run it on that "
            "GPU, or let it follow the cache"
        )
    try:
        driver = cuda_driver()
    except DriverError as error:
        raise KvNotShared(str(error)) from error
    return CudaKv(file, layers, driver, reader.index or 0)
