"""Committed KV of one cache on a GPU, mapped through CUDA IPC."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from paceline.cudaipc import Driver, DriverError, MappedMemory, NotMappable, cuda_driver
from paceline.drafter.kv.device_description import PoolDescription, read_pool_description
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.mapping import DTYPES, map_segment
from paceline.drafter.kv.shared import resolve
from paceline.kernels import streaming
from paceline.shm import is_orphan
from paceline.v1 import kv_pb2


class DeviceKv:
    """K and V of chosen layers in the pages of the verifier's own pool.

    The pool is mapped once for a process. How far may be read, and which pages are the cache's, is
    in the cache's file, which is mapped beside it: no call is needed to follow the text.

    Safety contract:

    - What :meth:`parts` gives are copies, made on the GPU that the pool is on.
    - Pages of a cache that was released go to others. So call :meth:`check` after reading, before
      what was read is used: it waits for the copies, and tells whether the cache is still there.
    - The whole pool can be read through the mapping. A drafter is trusted not to: where it is not,
      it has to follow the cache over gRPC, from another user or machine.
    - If the verifier dies while a copy runs, CUDA may fail for this process for good; before each
      copy it is looked whether the verifier lives.
    - One thread at a time. Whoever opened it closes it, once, after its last use.

    Attributes:
        layers: The mapped layers as they were asked for, negative ones included.
        generation: Of the cache.
        received: Bytes that came over a wire: none.
        updates: Selections that came over a wire: none.
        positions: Positions chosen by these: none.
    """

    transport: ClassVar[str] = "map"
    received = updates = positions = 0

    def __init__(
        self,
        description: PoolDescription,
        layers: Iterable[int],
        read_grant: bytes,
        driver: Driver,
        reader: int,
    ) -> None:
        """See :meth:`open`."""
        self.layers = tuple(layers)
        self.generation = description.generation
        self._description = description
        self._dtype = DTYPES[description.dtype]
        numbers = resolve(self.layers, description.layers)
        self._numbers = dict(zip(self.layers, numbers, strict=True))
        mapped = map_segment(
            description.path, description.file_bytes, description.generation, read_grant
        )
        self._header, self._file = mapped.header, mapped.file
        entries = description.capacity // description.page_size
        table = mapped.elements(torch.int32)[description.table_offset // 4 :]
        self._table: Tensor = table[:entries]
        try:
            self._memory = MappedMemory(
                driver, reader, description.device_uuid, description.handle,
                description.pool_offset, description.pool_bytes,
            )  # fmt: skip
        except NotMappable as error:
            self._leave()
            raise KvNotShared(str(error)) from error
        self._chosen: tuple[tuple[int, int], Tensor, Tensor] | None = None

    @classmethod
    def open(
        cls,
        response: kv_pb2.MapCacheResponse,
        read_grant: bytes,
        layers: Iterable[int],
        driver: Driver,
        reader: int,
    ) -> DeviceKv:
        """Map what a verifier described, every word of it checked.

        Args:
            response: The verifier's answer.
            read_grant: What it was asked with.
            layers: Layers to map; negative ones count from the last.
            driver: The GPU's driver.
            reader: Device that will read.

        Raises:
            KvNotShared: The description is wrong, or the memory cannot be reached from here.
        """
        return cls(read_pool_description(response), tuple(layers), read_grant, driver, reader)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file < 0

    @property
    def byte_size(self) -> int:
        """Bytes of the mapped layers' keys and values, at their largest."""
        shape = self._description
        row = shape.heads * shape.head_dim * self._dtype.itemsize
        return 2 * len(self.layers) * shape.capacity * row

    @property
    def committed(self) -> int:
        """Positions that may be read now; see :attr:`SharedKv.committed`.

        Raises:
            KvGone: The mapping was closed.
        """
        if self.closed:
            raise KvGone("this mapping was closed")
        return min(self._header.committed, self._description.capacity)

    def parts(self, index: int, below: int, budget: int) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`paceline.drafter.methods.base.TargetKv.parts`: copies on the GPU.

        Raises:
            KvGone: The mapping was closed, or the verifier is gone.
        """
        if index == self.layers[0]:
            self.check()
        length = min(self.committed, below)
        ranges = streaming(length, budget)
        if not ranges:
            return []
        if self._chosen is None or self._chosen[0] != (length, budget):
            positions = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
            self._chosen = ((length, budget), *self._places(positions))
        return [self._copy(index, *self._chosen[1:])]

    def at(self, index: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of a layer at positions, int64 ``[n]`` on the CPU, all below
        :attr:`committed`; each ``[heads, n, head_dim]``."""
        return self._copy(index, *self._places(positions))

    def check(self) -> None:
        """See :meth:`SharedKv.check`; what was copied before has arrived.

        Raises:
            KvGone: The verifier released the cache or died, or the mapping was closed.
        """
        if self.closed:
            raise KvGone("this mapping was closed")
        if self._memory.bytes.device.type == "cuda":
            torch.cuda.current_stream(self._memory.bytes.device).synchronize()
        if self._header.generation != self.generation:
            raise KvGone("the verifier released the cache")
        if is_orphan(self._file):
            raise KvGone("the verifier that held the cache is gone")

    def close(self) -> None:
        """Let go of the memory. Closing twice is safe."""
        if not self.closed:
            self._leave()
            self._chosen = None
            self._memory.close()

    def _leave(self) -> None:
        os.close(self._file)
        self._file = -1
        self._table = torch.empty(0)
        self._header.release()

    def _places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of positions and where they are in them, on the pool's device.

        Raises:
            KvGone: The page table makes no sense.
        """
        size = self._description.page_size
        pages = self._table[positions // size].long()
        if not bool(((pages >= 0) & (pages < self._description.pages)).all()):
            raise KvGone("the verifier's page table leads out of its pool")
        pages, places = torch.stack([pages, positions % size]).to(self._memory.bytes.device)
        return pages, places

    def _copy(self, index: int, pages: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._description
        keys, values = shape.layers[self._numbers[index]]
        elements = self._memory.bytes.view(self._dtype)
        size = (shape.pages, shape.heads, shape.page_size, shape.head_dim)
        both = []
        for plane in (keys, values):
            strides = (shape.page_stride, plane.head_stride, plane.position_stride, 1)
            pool = elements.as_strided(size, strides, plane.offset)
            both.append(pool[pages, :, places].transpose(0, 1))
        return both[0], both[1]


def map_device(
    response: kv_pb2.MapCacheResponse, read_grant: bytes, layers: Iterable[int], device: str
) -> DeviceKv:
    """Map what a verifier described for a drafter that computes on a device.

    Raises:
        KvNotShared: The drafter is on no GPU, or :meth:`DeviceKv.open` says so.
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
    return DeviceKv.open(response, read_grant, layers, driver, reader.index or 0)
