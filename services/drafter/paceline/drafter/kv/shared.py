"""Committed KV of one cache, mapped read-only."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import warnings
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from paceline.drafter.kv.description import KvDescription, Plane, read_description
from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.kernels import streaming
from paceline.shm import SegmentHeader, is_orphan
from paceline.v1 import kv_pb2

_DTYPES = {
    kv_pb2.KV_DTYPE_FLOAT32: torch.float32,
    kv_pb2.KV_DTYPE_FLOAT16: torch.float16,
    kv_pb2.KV_DTYPE_BFLOAT16: torch.bfloat16,
}


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
    """

    transport: ClassVar[str] = "map"
    received = 0

    def __init__(
        self,
        description: KvDescription,
        layers: Iterable[int],
        mapping: mmap.mmap,
        header: SegmentHeader,
        file: int,
    ) -> None:
        """See :meth:`open`."""
        self.layers = tuple(layers)
        self.generation = description.generation
        self.heads = description.heads
        self.capacity = description.capacity
        self.head_dim = description.head_dim
        self.dtype = _DTYPES[description.dtype]
        self._header = header
        self._file = file
        flat = _flat(mapping, self.dtype)
        shape = (self.heads, self.capacity, self.head_dim)

        def view(plane: Plane) -> Tensor:
            strides = (plane.head_stride, plane.position_stride, 1)
            return flat.as_strided(shape, strides, plane.offset)

        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        for asked, layer in zip(self.layers, _resolve(self.layers, description), strict=True):
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
        _resolve(layers, description)
        file = _open(description)
        try:
            mapping = mmap.mmap(file, description.byte_size, prot=mmap.PROT_READ)
            header = SegmentHeader(mapping)
            digest = hashlib.sha256(read_grant).digest()
            facts = (header.valid, header.generation, header.grant_digest)
            if facts != (True, description.generation, digest):
                raise KvNotShared(
                    f"{description.path} is not, or no longer, the cache of this read grant"
                )
            return cls(description, layers, mapping, header, file)
        except (OSError, ValueError) as error:
            os.close(file)
            raise KvNotShared(f"cannot map {description.path}: {error}") from error
        except BaseException:
            os.close(file)
            raise

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


def _open(description: KvDescription) -> int:
    """The segment's file: of this user, and as large as it was described."""
    path = description.path
    try:
        # Not blocking: whatever may be there instead of a file, a pipe say, must not hold us up.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags)
    except OSError as error:
        raise KvNotShared(
            f"cannot open {path}: {error.strerror}; run drafter and verifier on one machine, as "
            "one user, with one /dev/shm"
        ) from error
    facts = os.fstat(file)
    wrong = None
    if not stat.S_ISREG(facts.st_mode):
        wrong = "is no regular file"
    elif facts.st_uid != os.geteuid():
        wrong = f"belongs to user {facts.st_uid}, expected {os.geteuid()}"
    elif facts.st_size != description.byte_size:
        wrong = f"has {facts.st_size} bytes, described were {description.byte_size}"
    if wrong is not None:
        os.close(file)
        raise KvNotShared(f"{path} {wrong}")
    return file


def _resolve(layers: tuple[int, ...], description: KvDescription) -> list[int]:
    """Layers counted from 0."""
    count = max(description.layers) + 1
    if min(layers, default=0) < 0 and len(description.layers) != count:
        raise KvNotShared("the verifier left out layers, so that none can be counted from the last")
    resolved = [layer + count if layer < 0 else layer for layer in layers]
    for layer, number in zip(layers, resolved, strict=True):
        if number not in description.layers:
            raise KvNotShared(
                f"the drafter reads layer {layer}, but the verifier described "
                f"{len(description.layers)} layers without it; is it made for another target?"
            )
    return resolved


def _flat(mapping: mmap.mmap, dtype: torch.dtype) -> Tensor:
    """All elements of the file."""
    with warnings.catch_warnings():
        # That it is read-only is what we want; the contract above says what follows from it.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=dtype, count=len(mapping) // dtype.itemsize)
