"""KV on a GPU, mapped through CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.drafter.errors import KvGone, KvNotShared
from paceline.drafter.kv.mapped import MappedKv, view
from paceline.kv.cuda import CudaDriver, DriverError, MappedMemory, NotMappable, cuda_driver
from paceline.kv.segment import HEADER_BYTES
from paceline.kv.selection import streaming_positions
from paceline.v1 import kv_pb2


class CudaKv(MappedKv):
    """K and V of some layers in the pages of the verifier's pool.

    A process maps the pool once. The committed length and the page table are in the cache's file,
    which is mapped too, so that no call to the verifier is needed.

    Safety contract:

    - :meth:`parts` returns copies, made on the pool's GPU.
    - Pages of a released cache are reused. So call :meth:`check` after reading, before using what
      was read: it waits for the copies, and checks that the cache still exists.
    - The mapping gives access to the whole pool. Drafters that are not trusted with it have to
      follow the cache over gRPC, as another user or on another machine.
    - If the verifier dies during a copy, CUDA may fail for this process permanently; so
      :meth:`refresh` checks that the verifier is alive.
    """

    def __init__(
        self,
        response: kv_pb2.MapCacheResponse,
        read_grant: bytes,
        layers: Iterable[int],
        driver: CudaDriver,
        reader: int,
    ) -> None:
        """Map the memory that a verifier described, after checking the description.

        Args:
            response: The verifier's response.
            read_grant: Read grant of the cache.
            layers: Layers to map; negative ones count from the last.
            driver: The GPU's driver.
            reader: Ordinal of the device that reads.

        Raises:
            KvNotShared: The description is wrong, or this device cannot read the memory.
        """
        self._selected: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None
        super().__init__(response, read_grant, layers, paged=True)
        kv, pages, memory = response.kv, response.kv.pages, response.kv.pages.memory
        try:
            sizes = (kv.capacity, pages.page_size, pages.page_stride)
            if not all(sizes) or kv.capacity % pages.page_size:
                raise KvNotShared(
                    f"the verifier described {kv.capacity} positions in pages of "
                    f"{pages.page_size} and {pages.page_stride} bytes, expected whole pages"
                )
            if memory.byte_offset % 16 or memory.byte_size % self.dtype.itemsize:
                raise KvNotShared("the pool's offset or size splits elements")
            self._page_size = pages.page_size
            self._page_count = memory.byte_size // pages.page_stride
            entries = kv.capacity // pages.page_size
            words = self._elements(torch.int32)
            self._table = view(
                words, HEADER_BYTES, pages.table_offset, (1, entries), (4 * entries,)
            )[0]
            self._pool = MappedMemory(
                driver, reader, memory.device_uuid, memory.handle,
                memory.byte_offset, memory.byte_size,
            )  # fmt: skip
        except (KvNotShared, NotMappable) as error:
            super().close()
            raise KvNotShared(str(error)) from error
        elements = self._pool.bytes.view(self.dtype)
        planes = (self._page_count, kv.heads, pages.page_size, self.row)
        steps = (pages.page_stride, kv.head_stride, kv.position_stride)
        self._planes: dict[int, list[Tensor]] = {}
        try:
            for layer, offsets in self.described.items():
                self._planes[layer] = [
                    view(elements, 0, offset, planes, steps) for offset in offsets
                ]
        except KvNotShared:
            self.close()
            raise

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
        """See :class:`MappedKv`. The copies are on the GPU.

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
        self._planes = {}
        self._table = torch.empty(0)
        super().close()
        self._pool.close()

    def _slots(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns page and offset in the page of each position, on the pool's device.

        Raises:
            KvGone: An entry of the page table is not a page of the pool.
        """
        pages = self._table[positions // self._page_size].long()
        if not bool(((pages >= 0) & (pages < self._page_count)).all()):
            raise KvGone("the verifier's page table leads out of its pool")
        slots = torch.stack([pages, positions % self._page_size])
        pages, offsets = slots.to(self._pool.bytes.device)
        return pages, offsets

    def _copy(self, layer: int, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (plane[pages, :, offsets].transpose(0, 1) for plane in self._planes[layer])
        return keys, values


def map_cuda(
    response: kv_pb2.MapCacheResponse, read_grant: bytes, layers: Iterable[int], device: str
) -> CudaKv:
    """Map KV on a GPU for a drafter that runs on ``device``, by its torch name.

    Raises:
        KvNotShared: The drafter does not run on a GPU, or see :class:`CudaKv`.
    """
    reader = torch.device(device)
    if reader.type != "cuda":
        raise KvNotShared(
            f"the verifier's KV is on a GPU, and this drafter runs on {reader}; run it on that "
            "GPU, or let it follow the cache"
        )
    try:
        driver = cuda_driver()
    except DriverError as error:
        raise KvNotShared(f"there is no CUDA driver to map with: {error}") from error
    return CudaKv(response, read_grant, layers, driver, reader.index or 0)
