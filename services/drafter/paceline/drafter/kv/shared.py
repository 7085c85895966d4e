"""Committed KV of one cache, mapped read-only."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafter.kv.description import KvDescription, Plane, read_description
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.mapping import DTYPES, Mapped, map_segment
from paceline.kernels import streaming
from paceline.shm import is_orphan
from paceline.v1 import kv_pb2


class SharedKv:
    """K and V of chosen layers in the verifier's own memory: nothing is copied.

    Safety contract (see :class:`paceline.shm.SegmentHeader` for the writer's side):

    - Read positions below :attr:`committed` only. They never change. Those at or above it change at
      any time, and reading far above may take memory of the machine, or end the process (SIGBUS)
      where there is none left.
    - Never write: the pages are mapped read-only, and torch does not know. A write ends the process
      (SIGSEGV). So hand the tensors to nothing that works in place.
    - Call :meth:`check` after reading, before what was read is used: it tells whether the cache is
      still there. Nothing worse than a useless guess comes of a late check: the memory stays as it
      was even when the verifier released the cache or died.
    - Tensors keep the mapping: they may outlive :meth:`close`, and keep the memory from the machine
      as long as they do.
    - One thread at a time. Whoever opened it closes it, once, after its last use.

    Attributes:
        layers: The mapped layers as they were asked for, negative ones included.
        generation: Of the cache.
        heads: Key/value heads.
        capacity: Slots of every tensor. Unit: tokens.
        head_dim: Elements a head.
        dtype: Of the tensors: float32, float16 or bfloat16.
        received: Bytes that came over a wire: none.
        updates: Selections that came over a wire: none.
        positions: Positions that are held here: none.
    """

    transport: ClassVar[str] = "map"
    received = updates = positions = 0

    def __init__(
        self,
        description: KvDescription,
        layers: Iterable[int],
        mapped: Mapped,
    ) -> None:
        """See :meth:`open`."""
        self.layers = tuple(layers)
        self.generation = description.generation
        self.heads = description.heads
        self.capacity = description.capacity
        self.head_dim = description.head_dim
        self.dtype = DTYPES[description.dtype]
        self._header = mapped.header
        self._file = mapped.file
        flat = mapped.elements(self.dtype)
        shape = (self.heads, self.capacity, self.head_dim)

        def view(plane: Plane) -> Tensor:
            strides = (plane.head_stride, plane.position_stride, 1)
            return flat.as_strided(shape, strides, plane.offset)

        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        for asked, layer in zip(self.layers, resolve(self.layers, description.layers), strict=True):
            keys, values = description.layers[layer]
            self._views[asked] = (view(keys), view(values))

    @classmethod
    def open(
        cls, response: kv_pb2.MapCacheResponse, read_grant: bytes, layers: Iterable[int]
    ) -> SharedKv:
        """Map what a verifier described, having checked every word of it against the file.

        A lying verifier can make the drafter open nothing but a segment of the drafter's own user
        whose read grant is this one.

        Args:
            response: The verifier's answer.
            read_grant: What it was asked with.
            layers: Layers to map. Negative ones count from the last; ``response`` must then
                describe all.

        Raises:
            KvNotShared: The description is wrong, or the file is not there, not ours, or not what
                was described.
        """
        description = read_description(response)
        layers = tuple(layers)
        resolve(layers, description.layers)
        mapped = map_segment(
            description.path, description.byte_size, description.generation, read_grant
        )
        return cls(description, layers, mapped)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file < 0

    @property
    def byte_size(self) -> int:
        """Bytes of the mapped layers' keys and values, at their largest."""
        position = self.heads * self.head_dim * self.dtype.itemsize
        return 2 * len(self.layers) * self.capacity * position

    @property
    def committed(self) -> int:
        """Positions that may be read now; grows with each round, without a call. Unit: tokens.

        The client's own word for it (``Update.committed_length``) is no leave to read.

        Raises:
            KvGone: The mapping was closed.
        """
        if self.closed:
            raise KvGone("this mapping was closed")
        return min(self._header.committed, self.capacity)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values of a layer, each ``[heads, capacity, head_dim]``, last
        dimension dense, on the CPU.

        Args:
            index: One of :attr:`layers`.

        Raises:
            KeyError: The layer was not mapped, or the mapping was closed.
        """
        return self._views[index]

    def at(self, index: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of a layer at positions, int64 ``[n]``, all below
        :attr:`committed`; each ``[heads, n, head_dim]``."""
        keys, values = self._views[index]
        return torch.index_select(keys, 1, positions), torch.index_select(values, 1, positions)

    def parts(self, index: int, below: int, budget: int) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`paceline.drafter.methods.base.TargetKv.parts`: views, nothing is copied.

        Raises:
            KvGone: The mapping was closed.
        """
        return streaming_parts(self.layer(index), min(self.committed, below), budget)

    def check(self) -> None:
        """Make sure that the cache is still there: a look at the header, and one at the owner.

        Raises:
            KvGone: The verifier released the cache or died, or the mapping was closed.
        """
        if self.closed:
            raise KvGone("this mapping was closed")
        if self._header.generation != self.generation:
            raise KvGone("the verifier released the cache")
        if is_orphan(self._file):
            raise KvGone("the verifier that held the cache is gone")

    def close(self) -> None:
        """Let go of the memory, but for tensors that others still hold. Closing twice is safe."""
        if self.closed:
            return
        os.close(self._file)
        self._file = -1
        self._views = {}
        self._header.release()


def streaming_parts(
    planes: tuple[Tensor, Tensor], length: int, budget: int
) -> list[tuple[Tensor, Tensor]]:
    """Views of the positions that :func:`paceline.kernels.streaming` chooses of the first ones.

    Args:
        planes: Keys and values, each ``[Hkv, capacity, D]``.
        length: Positions to choose from.
        budget: Most positions; 0 for all.
    """
    keys, values = planes
    return [
        (keys[:, part.start : part.stop], values[:, part.start : part.stop])
        for part in streaming(length, budget)
    ]


def resolve(layers: tuple[int, ...], described: Collection[int]) -> list[int]:
    """Layers counted from 0.

    Args:
        layers: As they were asked for; negative ones count from the last.
        described: Those that the verifier described, at least one.

    Raises:
        KvNotShared: One is not among them.
    """
    count = max(described) + 1
    if min(layers, default=0) < 0 and len(described) != count:
        raise KvNotShared("the verifier left out layers, so that none can be counted from the last")
    resolved = [layer + count if layer < 0 else layer for layer in layers]
    for layer, number in zip(layers, resolved, strict=True):
        if number not in described:
            raise KvNotShared(
                f"the drafter reads layer {layer}, but the verifier described "
                f"{len(described)} layers without it; is it made for another target?"
            )
    return resolved
