"""Checks a verifier's description of its memory before anything is mapped or read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

from torch import Tensor

from paceline.drafter.kv.errors import KvNotShared
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD, segment_path
from paceline.kv.wire import CACHE_TYPES
from paceline.v1 import kv_pb2

_MAX_PAGE_SIZE = 1 << 16


@dataclass(frozen=True)
class Array:
    """A strided array in the described memory. Unit: elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def inside(
        cls,
        begin: int,
        end: int,
        start: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        size: int,
    ) -> Self:
        """Check and convert an array whose last dimension is dense.

        Args:
            begin: First byte that it may occupy.
            end: One past the last byte that it may occupy.
            start: Its first byte.
            shape: Its shape.
            strides: Its strides but the last, in bytes; rows must not overlap.
            size: Bytes per element.

        Raises:
            KvNotShared: It is empty, leads out of these bytes, or splits elements.
        """
        row = shape[-1] * size
        stop = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=False)) + row
        if not prod(shape):
            raise KvNotShared(f"the verifier described a shape {shape}, expected none to be 0")
        # torch stores all strides, so those that are not used (one head) are bounded too.
        if start < begin or stop > end or max(strides) > end or strides[-1] < row:
            raise KvNotShared(
                f"the verifier described an array from byte {start} to {stop}, with strides "
                f"{strides}, expected it inside bytes {begin} to {end} and rows of {row} bytes not "
                "to overlap"
            )
        if any(number % size for number in (start, *strides)):
            raise KvNotShared(f"offset {start} or strides {strides} split elements of {size} bytes")
        return cls(start // size, shape, (*(step // size for step in strides), 1))

    def view(self, elements: Tensor) -> Tensor:
        """Returns the array in flat memory."""
        return elements.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True)
class FileDescription:
    """A cache's shared-memory file. By its name it is a KV segment."""

    path: Path
    byte_size: int
    """Size that the file must have. Unit: bytes."""

    generation: int
    dtype: kv_pb2.KvDtype
    """One of ``CACHE_TYPES``."""


@dataclass(frozen=True)
class KvDescription:
    """A consistent description of keys and values, not compared with the memory yet."""

    file: FileDescription
    capacity: int
    """Positions. Unit: tokens."""

    layer_bytes: int
    """Keys and values of one layer, for the whole capacity. Unit: bytes."""

    layers: dict[int, tuple[Array, Array]]
    """Keys and values by layer, ``[heads, capacity, head_dim]``; with pages ``[heads, page_size,
    head_dim]`` of page 0."""


@dataclass(frozen=True)
class PagesDescription:
    """A consistent description of a pool of pages on a GPU, and of a page table in the cache's
    file."""

    memory: kv_pb2.CudaIpcMemory
    table_offset: int
    """Start of the page table. Unit: bytes from the start of the file."""

    entries: int
    """Entries of the page table, int32."""

    pages: int
    """Pages of the pool."""

    page_size: int
    """Positions per page. Unit: tokens."""

    page_stride: int
    """Unit: elements."""


def read_kv(response: kv_pb2.MapCacheResponse) -> KvDescription:
    """Check the description of KV in shared memory.

    Raises:
        KvNotShared: It contradicts itself, leads out of the file, or describes other memory.
    """
    first = _first(response, "posix")
    if first.page_size:
        raise KvNotShared("the verifier's KV is not contiguous POSIX shared memory")
    return _read_kv(response, first.posix, first.capacity, HEADER_BYTES, first.posix.byte_size)


def read_pages(response: kv_pb2.MapCacheResponse) -> tuple[KvDescription, PagesDescription]:
    """Check the description of KV in pages of a pool on a GPU.

    Raises:
        KvNotShared: It contradicts itself, leads out of the pool or the file, or describes other
            memory.
    """
    first = _first(response, "cuda_ipc")
    pool, stride = first.cuda_ipc, first.page_stride
    if not 0 < first.page_size <= _MAX_PAGE_SIZE or not 0 < stride <= pool.byte_size:
        raise KvNotShared(
            f"the verifier described pages of {first.page_size} positions and {stride} bytes, in a "
            f"pool of {pool.byte_size} bytes"
        )
    kv = _read_kv(response, first.page_table_memory, first.page_size, 0, stride)
    size = CACHE_TYPES[kv.file.dtype].itemsize
    if pool.byte_offset % 16 or pool.byte_size % size or stride % size:
        raise KvNotShared(f"the pool's offset, size or stride splits elements of {size} bytes")
    entries, table = first.capacity // first.page_size, first.page_table_offset
    if first.capacity % first.page_size or not entries:
        raise KvNotShared(f"a capacity of {first.capacity} is not a number of whole pages")
    if table < HEADER_BYTES or table % 4 or table + 4 * entries > kv.file.byte_size:
        raise KvNotShared(
            f"the verifier described a page table at byte {table}, in a file of "
            f"{kv.file.byte_size} bytes"
        )
    pages = pool.byte_size // stride
    return kv, PagesDescription(pool, table, entries, pages, first.page_size, stride // size)


def read_states(
    response: kv_pb2.MapCacheResponse, layers: Sequence[int], window: int
) -> tuple[FileDescription, list[Array]]:
    """Check the description of hidden states in shared memory.

    Args:
        response: The verifier's response.
        layers: Layers, in the order in which they are read.
        window: Newest positions that are read; 0: all.

    Returns:
        The file, and a ring ``[slots, hidden]`` for each layer.

    Raises:
        KvNotShared: It contradicts itself, leads out of the file, or lacks a layer.
    """
    found = {described.layer: described for described in response.hidden_states}
    if len(found) != len(response.hidden_states) or set(found) != set(layers):
        raise KvNotShared(
            f"the verifier described hidden states of layers {sorted(found)}, expected each of "
            f"{sorted(layers)} once"
        )
    memory, slots = found[layers[0]].posix, found[layers[0]].slots
    file = _file(response, memory)
    if any((each.posix, each.slots) != (memory, slots) for each in found.values()):
        raise KvNotShared("the verifier described hidden states that differ in memory or shape")
    if slots < window + TAP_AHEAD:
        raise KvNotShared(
            f"the verifier keeps {slots} hidden states, expected at least {window + TAP_AHEAD}"
        )
    return file, [
        Array.inside(
            HEADER_BYTES, file.byte_size, each.offset, (slots, each.hidden_size),
            (each.position_stride,), CACHE_TYPES[file.dtype].itemsize,
        )
        for each in (found[layer] for layer in layers)
    ]  # fmt: skip


def resolve(layers: Iterable[int], described: Collection[int]) -> list[int]:
    """Returns layers counted from 0.

    Args:
        layers: Layers as the method named them; negative ones count from the last.
        described: Layers that the verifier described, at least one.

    Raises:
        KvNotShared: A layer is not among them.
    """
    count, resolved = max(described) + 1, []
    for layer in layers:
        if layer < 0 and len(described) != count:
            raise KvNotShared("the verifier left out layers, so none can be counted from the last")
        resolved.append(layer + count if layer < 0 else layer)
        if resolved[-1] not in described:
            raise KvNotShared(
                f"the drafter reads layer {layer}, but the verifier described {len(described)} "
                "layers without it; was the drafter made for another target?"
            )
    return resolved


def _first(response: kv_pb2.MapCacheResponse, memory: str) -> kv_pb2.KvSegment:
    """Returns the first segment, after a check that all have this kind of memory."""
    if not response.segments:
        raise KvNotShared("the verifier described no segment")
    if any(segment.WhichOneof("memory") != memory for segment in response.segments):
        names = {"posix": "contiguous POSIX shared memory", "cuda_ipc": "GPU memory"}
        raise KvNotShared(f"the verifier's KV is not {names[memory]}")
    return response.segments[0]


def _file(response: kv_pb2.MapCacheResponse, memory: kv_pb2.PosixSharedMemory) -> FileDescription:
    if response.dtype not in CACHE_TYPES:
        raise KvNotShared(
            f"the verifier's KV has the type number {response.dtype}, expected one of "
            f"{sorted(CACHE_TYPES)}: float32, float16, bfloat16"
        )
    if not response.generation:
        raise KvNotShared("the verifier named no generation")
    try:
        path = segment_path(memory.name.removeprefix("/"))
    except ValueError as error:
        raise KvNotShared(f"the verifier named memory that cannot be mapped: {error}") from error
    return FileDescription(path, memory.byte_size, response.generation, response.dtype)


def _read_kv(
    response: kv_pb2.MapCacheResponse,
    memory: kv_pb2.PosixSharedMemory,
    positions: int,
    begin: int,
    end: int,
) -> KvDescription:
    """Check segments of so many contiguous positions, each between the bytes begin and end."""
    file, first = _file(response, memory), response.segments[0]
    size = CACHE_TYPES[file.dtype].itemsize
    shape = (first.heads, positions, first.head_dim)
    found: dict[tuple[int, bool], Array] = {}
    for segment in response.segments:
        if _common(segment) != _common(first):
            raise KvNotShared("the verifier described segments that differ in memory or shape")
        if (segment.layer, segment.is_value) in found:
            raise KvNotShared(f"the verifier described layer {segment.layer} twice")
        strides = (segment.head_stride, segment.position_stride)
        array = Array.inside(begin, end, segment.offset, shape, strides, size)
        found[segment.layer, segment.is_value] = array
    layers = {layer for layer, _ in found}
    if len(found) != 2 * len(layers):
        raise KvNotShared("the verifier described keys without values, or values without keys")
    return KvDescription(
        file,
        first.capacity,
        2 * first.heads * first.capacity * first.head_dim * size,
        {layer: (found[layer, False], found[layer, True]) for layer in layers},
    )


def _common(segment: kv_pb2.KvSegment) -> kv_pb2.KvSegment:
    """Returns the fields that all segments of a cache have in common."""
    common = kv_pb2.KvSegment()
    common.CopyFrom(segment)
    for field in ("layer", "is_value", "offset", "head_stride", "position_stride"):
        common.ClearField(field)
    return common
