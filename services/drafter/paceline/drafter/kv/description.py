"""Checks a verifier's description of its memory before anything is mapped or read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from paceline.drafter.kv.errors import KvNotShared
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD, segment_path
from paceline.kv.wire import CACHE_TYPES
from paceline.v1 import kv_pb2

_MAX_PAGE_SIZE = 1 << 16


@dataclass(frozen=True)
class Plane:
    """Keys or values of one layer: ``[heads, positions, head_dim]``, the last dimension dense."""

    offset: int
    """Start, in the file or in page 0. Unit: elements."""

    head_stride: int
    position_stride: int


@dataclass(frozen=True)
class FileDescription:
    """A cache's shared-memory file, by its name a KV segment."""

    path: Path
    byte_size: int
    """Size that the file must have. Unit: bytes."""

    generation: int
    dtype: kv_pb2.KvDtype
    """One of ``CACHE_TYPES``."""


@dataclass(frozen=True)
class KvDescription:
    """A consistent description of keys and values: every element lies inside the file, behind its
    header, or inside a page. It was not compared with the memory yet."""

    file: FileDescription
    heads: int
    capacity: int
    """Positions. Unit: tokens."""

    head_dim: int
    layers: dict[int, tuple[Plane, Plane]]
    """Keys and values by layer."""


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


@dataclass(frozen=True)
class RingsDescription:
    """A consistent description of hidden states: one ring of ``[slots, hidden]`` per layer."""

    file: FileDescription
    hidden: int
    slots: int
    rings: tuple[tuple[int, int], ...]
    """Start and row stride of each layer, in the requested order. Unit: elements."""


def read_kv(response: kv_pb2.MapCacheResponse) -> KvDescription:
    """Check the description of KV in shared memory.

    Raises:
        KvNotShared: It contradicts itself, leads out of the file, or describes other memory.
    """
    first = _first(response, "posix")
    if first.page_size:
        raise KvNotShared("the verifier's KV is not contiguous POSIX shared memory")
    file = _file(response, first.posix)
    bounds = (HEADER_BYTES, first.posix.byte_size)
    return KvDescription(
        file, first.heads, first.capacity, first.head_dim,
        _planes(response, first.capacity, bounds),
    )  # fmt: skip


def read_pages(response: kv_pb2.MapCacheResponse) -> tuple[KvDescription, PagesDescription]:
    """Check the description of KV in pages of a pool on a GPU.

    Raises:
        KvNotShared: It contradicts itself, leads out of the pool or the file, or describes other
            memory.
    """
    first = _first(response, "cuda_ipc")
    file = _file(response, first.page_table_memory)
    size, stride = CACHE_TYPES[file.dtype].itemsize, first.page_stride
    pool = first.cuda_ipc
    if not 0 < first.page_size <= _MAX_PAGE_SIZE or not 0 < stride <= pool.byte_size:
        raise KvNotShared(
            f"the verifier described pages of {first.page_size} positions and {stride} bytes, in a "
            f"pool of {pool.byte_size} bytes"
        )
    if pool.byte_offset % 16 or pool.byte_size % size or stride % size:
        raise KvNotShared(f"the pool's offset, size or stride splits elements of {size} bytes")
    entries, table = first.capacity // first.page_size, first.page_table_offset
    if first.capacity % first.page_size or not entries:
        raise KvNotShared(f"a capacity of {first.capacity} is not a number of whole pages")
    if table < HEADER_BYTES or table % 4 or table + 4 * entries > file.byte_size:
        raise KvNotShared(
            f"the verifier described a page table at byte {table}, in a file of {file.byte_size} "
            "bytes"
        )
    planes = _planes(response, first.page_size, (0, stride))
    return KvDescription(file, first.heads, first.capacity, first.head_dim, planes), (
        PagesDescription(
            pool, table, entries, pool.byte_size // stride, first.page_size, stride // size
        )
    )


def read_rings(
    response: kv_pb2.MapCacheResponse, layers: Sequence[int], window: int
) -> RingsDescription:
    """Check the description of hidden states in shared memory.

    Args:
        response: The verifier's response.
        layers: Layers, in the order in which they are read.
        window: Newest positions that are read; 0: all.

    Raises:
        KvNotShared: It contradicts itself, leads out of the file, or lacks a layer.
    """
    found = {described.layer: described for described in response.hidden_states}
    if len(found) != len(response.hidden_states) or set(found) != set(layers):
        raise KvNotShared(
            f"the verifier described hidden states of layers {sorted(found)}, expected each of "
            f"{sorted(layers)} once"
        )
    first = found[layers[0]]
    file = _file(response, first.posix)
    size = CACHE_TYPES[file.dtype].itemsize
    for each in found.values():
        if (each.posix, each.hidden_size, each.slots) != (
            first.posix, first.hidden_size, first.slots,
        ):  # fmt: skip
            raise KvNotShared("the verifier described hidden states that differ in memory or shape")
        shape, strides = (each.slots, each.hidden_size), (each.position_stride,)
        _check_inside(each.offset, shape, strides, size, (HEADER_BYTES, file.byte_size))
    if first.slots < window + TAP_AHEAD:
        raise KvNotShared(
            f"the verifier keeps {first.slots} hidden states, expected at least "
            f"{window + TAP_AHEAD}"
        )
    rings = [
        (found[layer].offset // size, found[layer].position_stride // size) for layer in layers
    ]
    return RingsDescription(file, first.hidden_size, first.slots, tuple(rings))


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


def _planes(
    response: kv_pb2.MapCacheResponse, positions: int, bounds: tuple[int, int]
) -> dict[int, tuple[Plane, Plane]]:
    """Returns the planes of all layers, each of which lies inside ``bounds``."""
    size = CACHE_TYPES[response.dtype].itemsize
    first = response.segments[0]
    planes: dict[tuple[int, bool], Plane] = {}
    for segment in response.segments:
        if _common(segment) != _common(first):
            raise KvNotShared("the verifier described segments that differ in memory or shape")
        if (segment.layer, segment.is_value) in planes:
            raise KvNotShared(f"the verifier described layer {segment.layer} twice")
        shape = (segment.heads, positions, segment.head_dim)
        strides = (segment.head_stride, segment.position_stride)
        _check_inside(segment.offset, shape, strides, size, bounds)
        planes[segment.layer, segment.is_value] = Plane(
            segment.offset // size, segment.head_stride // size, segment.position_stride // size
        )
    layers = {layer for layer, _ in planes}
    if len(planes) != 2 * len(layers):
        raise KvNotShared("the verifier described keys without values, or values without keys")
    return {layer: (planes[layer, False], planes[layer, True]) for layer in layers}


def _common(segment: kv_pb2.KvSegment) -> kv_pb2.KvSegment:
    """Returns the fields that all segments of a cache have in common."""
    common = kv_pb2.KvSegment()
    common.CopyFrom(segment)
    for field in ("layer", "is_value", "offset", "head_stride", "position_stride"):
        common.ClearField(field)
    return common


def _check_inside(
    start: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    size: int,
    bounds: tuple[int, int],
) -> None:
    """Check that an array lies inside a part of the memory.

    Args:
        start: Its first element. Unit: bytes, like all below.
        shape: Its shape; the last dimension is dense.
        strides: Its other strides; rows must not overlap.
        size: An element's size.
        bounds: First byte, and one past the last.

    Raises:
        KvNotShared: It does not, or an offset or stride splits elements.
    """
    begin, end = bounds
    row = shape[-1] * size
    stop = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=False)) + row
    if not prod(shape):
        raise KvNotShared(
            f"the verifier described an array of shape {shape}, expected none to be 0"
        )
    # Strides are bounded too where they are not used (one head, one position): torch stores them.
    if start < begin or stop > end or max(strides) > end or strides[-1] < row:
        raise KvNotShared(
            f"the verifier described an array from byte {start} to {stop}, with strides {strides}, "
            f"expected it inside bytes {begin} to {end} and rows of {row} bytes not to overlap"
        )
    if any(number % size for number in (start, *strides)):
        raise KvNotShared(f"offset {start} or strides {strides} split elements of {size} bytes")
