"""KV and hidden states in the verifier's POSIX shared memory, mapped read-only."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafter.errors import KvGone, KvNotShared
from paceline.drafter.kv.reader import CacheReader, KvReader, StateReader, StreamingReader
from paceline.kernels.caches import from_rows, row_width
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD, SegmentHeader, is_orphan, segment_path
from paceline.kv.wire import KV_TYPES, STATE_TYPES
from paceline.v1 import kv_pb2


class MappedReader(CacheReader):
    """Reads a cache whose file is mapped read-only.

    The file must belong to the drafter's own user, and its header must hold the digest of the read
    grant. So a malicious verifier cannot make the drafter open any other file.

    Safety contract (see :class:`paceline.kv.segment.SegmentHeader` for the writer's side):

    - Read positions below :attr:`committed` only. They never change. Those at or above it change at
      any time, and reading far above may allocate memory, or end the process (SIGBUS).
    - Never write: the pages are mapped read-only, but torch does not enforce it: a write ends
      the process (SIGSEGV). So pass the tensors to no in-place operation.
    - Tensors keep the mapping alive: they may outlive :meth:`close`, and keep the memory.
    """

    byte_size = 0

    def __init__(self, response: kv_pb2.MapCacheResponse, read_grant: bytes, capacity: int) -> None:
        """Map the file that a verifier named.

        Args:
            response: The verifier's response.
            read_grant: Read grant of the cache.
            capacity: Positions of the cache. Unit: tokens.

        Raises:
            KvNotShared: The file is missing, belongs to another user, or is not as described.
        """
        if response.dtype not in STATE_TYPES:
            raise KvNotShared(
                f"the verifier's hidden states have the type number {response.dtype}, expected one "
                f"of {sorted(STATE_TYPES)}: float32, float16, bfloat16"
            )
        if not response.generation:
            raise KvNotShared("the verifier named no generation")
        try:
            path = segment_path(response.file.name.removeprefix("/"))
        except ValueError as error:
            raise KvNotShared(
                f"the verifier named memory that cannot be mapped: {error}"
            ) from error
        self._generation = response.generation
        self._capacity = capacity
        self._file = _open(path, response.file.byte_size)
        try:
            self._memory = mmap.mmap(self._file, response.file.byte_size, prot=mmap.PROT_READ)
            self._header = SegmentHeader(self._memory)
            digest = hashlib.sha256(read_grant).digest()
            header = (self._header.valid, self._header.generation, self._header.grant_digest)
            if header != (True, self._generation, digest):
                raise KvNotShared(f"{path} is not, or no longer, the cache of this read grant")
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise KvNotShared(f"cannot map {path}: {error}") from error
        except BaseException:
            os.close(self._file)
            raise

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file < 0

    @property
    def committed(self) -> int:
        """Committed length now, without a call to the verifier. Unit: tokens.

        Raises:
            KvGone: The mapping was closed.
        """
        self._check_open()
        return min(self._header.committed, self._capacity)

    def check(self) -> None:
        """Check that the cache still exists, by its header and its owner's lock.

        The memory keeps its contents after a release or the end of the verifier, so what was read
        before a failing check is useless, but never another cache's.

        Raises:
            KvGone: The verifier released the cache or has ended, or the mapping was closed.
        """
        self._check_open()
        if self._header.generation != self._generation:
            raise KvGone("the verifier released the cache")
        if is_orphan(self._file):
            raise KvGone("the verifier of the cache has ended")

    def close(self) -> None:
        """Close the file and drop the mapping. Closing twice is safe."""
        if not self.closed:
            os.close(self._file)
            self._file = -1
            self._header.release()
            del self._memory

    def _elements(self, dtype: torch.dtype) -> Tensor:
        """Returns the whole file as elements of a type, read-only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            count = len(self._memory) // dtype.itemsize
            return torch.frombuffer(self._memory, dtype=dtype, count=count)

    def _check_open(self) -> None:
        if self.closed:
            raise KvGone("this mapping was closed")


class MappedKv(MappedReader, KvReader):
    """KV in memory of the verifier, any position of which can be read."""

    def __init__(
        self,
        response: kv_pb2.MapCacheResponse,
        read_grant: bytes,
        layers: Iterable[int],
        *,
        paged: bool,
    ) -> None:
        """Map the cache's file.

        Args:
            response: The verifier's response.
            read_grant: Read grant of the cache.
            layers: Layers to read. Negative ones count from the last; ``response`` must then
                describe all layers.
            paged: Whether the KV has to lie in pages on a GPU, or in the file.

        Raises:
            KvNotShared: The description is wrong, or the file is not as described.
        """
        kv = response.kv
        if kv.HasField("pages") != paged:
            raise KvNotShared(f"the verifier's KV is {'not ' * paged}in pages on a GPU")
        number = kv.dtype or response.dtype
        if number not in KV_TYPES or (paged and number not in STATE_TYPES):
            raise KvNotShared(
                f"the verifier's KV has the type number {number}, expected one of "
                f"{sorted(KV_TYPES)}: float32, float16, bfloat16, int8 (not in pages)"
            )
        self.layers = tuple(layers)
        self.dtype = KV_TYPES[number]
        """Type of keys and values; int8 as in :mod:`paceline.kernels.caches`."""
        self.described = _described(kv, self.layers)
        """Offsets of keys and values of each of :attr:`layers`."""
        width = row_width(kv.head_dim, self.dtype)
        self.row = width
        """Elements of a head at a position."""
        super().__init__(response, read_grant, kv.capacity)
        layer_bytes = 2 * kv.heads * kv.capacity * width * self.dtype.itemsize
        self.byte_size = len(self.layers) * layer_bytes

    @abstractmethod
    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of keys and values at positions, each ``[Hkv, n, D]``.

        Args:
            layer: One of :attr:`layers`.
            positions: int64 ``[n]`` on the CPU, all below :attr:`committed`.
        """


class SharedKv(MappedKv, StreamingReader):
    """K and V of some layers in the verifier's own memory.

    For the safety contract see :class:`MappedReader`.
    """

    def __init__(
        self, response: kv_pb2.MapCacheResponse, read_grant: bytes, layers: Iterable[int]
    ) -> None:
        """Map the memory that a verifier described. See :class:`MappedKv`."""
        super().__init__(response, read_grant, layers, paged=False)
        kv, elements = response.kv, self._elements(self.dtype)
        shape, strides = (kv.heads, kv.capacity, self.row), (kv.head_stride, kv.position_stride)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            for layer, (keys, values) in self.described.items():
                self._views[layer] = (
                    view(elements, HEADER_BYTES, keys, shape, strides),
                    view(elements, HEADER_BYTES, values, shape, strides),
                )
        except BaseException:
            self.close()
            raise

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys (after RoPE) and values of a layer on the CPU, each ``[heads, capacity,
        head_dim]``, last dimension dense; int8 as in :mod:`paceline.kernels.caches`.

        Args:
            index: One of :attr:`layers`.

        Raises:
            KeyError: The layer was not mapped, or the mapping was closed.
        """
        return self._views[index]

    def gather(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
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

    def __init__(
        self,
        response: kv_pb2.MapCacheResponse,
        read_grant: bytes,
        layers: Sequence[int],
        window: int,
    ) -> None:
        """Map the memory that a verifier described.

        Args:
            response: The verifier's response.
            read_grant: Read grant of the cache.
            layers: Layers, in the order in which they are read.
            window: Newest positions that are read; 0: all.

        Raises:
            KvNotShared: The description is wrong, or the file is not as described.
        """
        states = response.hidden_states
        offsets = {each.layer: each.offset for each in states.layers}
        if len(offsets) != len(states.layers) or set(offsets) != set(layers):
            raise KvNotShared(
                f"the verifier described hidden states of layers {sorted(offsets)}, expected each "
                f"of {sorted(layers)} once"
            )
        if states.slots < window + TAP_AHEAD:
            raise KvNotShared(
                f"the verifier keeps {states.slots} hidden states, expected at least "
                f"{window + TAP_AHEAD}"
            )
        super().__init__(response, read_grant, sys.maxsize)
        self.byte_size = response.file.byte_size
        self._window = window
        self._slots = states.slots
        shape, strides = (states.slots, states.hidden_size), (states.position_stride,)
        try:
            elements = self._elements(STATE_TYPES[response.dtype])
            self._rings = [
                view(elements, HEADER_BYTES, offsets[layer], shape, strides) for layer in layers
            ]
        except BaseException:
            self.close()
            raise

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        begin = min(end, max(begin, self._oldest()))
        slots = torch.arange(begin, end) % self._slots
        states = torch.cat([ring.index_select(0, slots) for ring in self._rings], dim=1)
        # Rows may have been overwritten while they were copied.
        first = min(end, max(begin, self._oldest()))
        return first, states[first - begin :]

    def close(self) -> None:
        self._rings = []
        super().close()

    def _oldest(self) -> int:
        """Returns the oldest position whose row cannot be overwritten now."""
        committed = self.committed
        kept = committed - self._window if self._window else 0
        return max(kept, committed + TAP_AHEAD - self._slots, 0)


def view(
    memory: Tensor, begin: int, start: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """Returns an array in flat memory, after checking that it lies there.

    Args:
        memory: Elements of the array's type.
        begin: First byte that the array may occupy.
        start: First byte of the array.
        shape: Its shape; the last dimension is dense.
        strides: Its strides but the last, in bytes; rows must not overlap.

    Raises:
        KvNotShared: It is empty, leads out of the memory, or splits elements.
    """
    size, end = memory.element_size(), memory.nbytes
    row = shape[-1] * size
    if not all(shape):
        raise KvNotShared(f"the verifier described a shape {shape}, expected none to be 0")
    stop = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=False)) + row
    # torch stores all strides, so those that are not used (one head) are bounded too.
    if start < begin or stop > end or max(strides) > end or strides[-1] < row:
        raise KvNotShared(
            f"the verifier described an array from byte {start} to {stop}, with strides {strides}, "
            f"expected it inside bytes {begin} to {end} and rows of {row} bytes not to overlap"
        )
    if any(number % size for number in (start, *strides)):
        raise KvNotShared(f"offset {start} or strides {strides} split elements of {size} bytes")
    return memory.as_strided(shape, (*(step // size for step in strides), 1), start // size)


def _described(kv: kv_pb2.KvLayout, layers: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Returns the offsets of keys and values by layer, as the method named it.

    Raises:
        KvNotShared: A layer is not described, or described twice.
    """
    offsets = {each.layer: (each.key_offset, each.value_offset) for each in kv.layers}
    if not offsets or len(offsets) != len(kv.layers):
        raise KvNotShared("the verifier described no layer, or one of them twice")
    count, described = max(offsets) + 1, {}
    for layer in layers:
        if layer < 0 and len(offsets) != count:
            raise KvNotShared("the verifier left out layers, so none can be counted from the last")
        number = layer + count if layer < 0 else layer
        if number not in offsets:
            raise KvNotShared(
                f"the drafter reads layer {layer}, but the verifier described {len(offsets)} "
                "layers without it; was the drafter made for another target?"
            )
        described[layer] = offsets[number]
    return described


def _open(path: Path, byte_size: int) -> int:
    """Open a regular file of this user and of this size."""
    try:
        # O_NONBLOCK: if the name is a pipe, open() must not wait.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags)
    except OSError as error:
        raise KvNotShared(
            f"cannot open {path}: {error.strerror}; run drafter and verifier on one machine, as "
            "one user, with one /dev/shm"
        ) from error
    status = os.fstat(file)
    wrong = None
    if not stat.S_ISREG(status.st_mode):
        wrong = "is not a regular file"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}, expected {os.geteuid()}"
    elif status.st_size != byte_size:
        wrong = f"has {status.st_size} bytes, expected {byte_size} as described"
    if wrong is not None:
        os.close(file)
        raise KvNotShared(f"{path} {wrong}")
    return file
