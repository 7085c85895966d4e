"""What a verifier says about KV on a GPU, checked before anything is done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.drafter.kv.description import ELEMENT_BYTES, Plane, segment_file
from paceline.drafter.kv.errors import KvNotShared
from paceline.shm import HEADER_BYTES
from paceline.v1 import kv_pb2

_MOST_PAGE = 1 << 16


@dataclass(frozen=True)
class PoolDescription:
    """A description that is sound in itself: every element of every page lies inside the pool, and
    the page table inside the cache's file. Nothing in it was compared with either yet."""

    path: Path
    """The cache's file; by its name a KV segment."""

    file_bytes: int
    """Size it must have. Unit: bytes."""

    table_offset: int
    """Start of the page table. Unit: bytes from the start of the file."""

    device_uuid: bytes
    handle: bytes
    pool_offset: int
    """Start of the pool in the allocation. Unit: bytes."""

    pool_bytes: int
    pages: int
    page_size: int
    """Positions a page. Unit: tokens."""

    page_stride: int
    """Unit: elements."""

    dtype: kv_pb2.KvDtype
    heads: int
    capacity: int
    head_dim: int
    generation: int
    layers: dict[int, tuple[Plane, Plane]]
    """Keys and values of page 0, by layer."""


def read_pool_description(response: kv_pb2.MapCacheResponse) -> PoolDescription:
    """Check and convert a verifier's answer.

    Raises:
        KvNotShared: It contradicts itself, or leads out of the pool or the file.
    """
    if response.dtype not in ELEMENT_BYTES or not response.generation or not response.segments:
        raise KvNotShared("the verifier described no KV, or of no type that can be mapped")
    size = ELEMENT_BYTES[response.dtype]
    first = response.segments[0]
    planes: dict[tuple[int, bool], Plane] = {}
    for segment in response.segments:
        if _common(segment) != _common(first) or (segment.layer, segment.is_value) in planes:
            raise KvNotShared("the verifier described segments that differ, or one of them twice")
        planes[segment.layer, segment.is_value] = _plane(segment, size)
    numbers = {layer for layer, _ in planes}
    if len(planes) != 2 * len(numbers):
        raise KvNotShared("the verifier described keys without values, or values without keys")
    entries = first.capacity // first.page_size
    table, file_bytes = first.page_table_offset, first.page_table_memory.byte_size
    if first.capacity % first.page_size or not entries:
        raise KvNotShared(f"a capacity of {first.capacity} is no number of whole pages")
    if table < HEADER_BYTES or table % 4 or table + 4 * entries > file_bytes:
        raise KvNotShared(
            f"the verifier described a page table at byte {table}, in a file of {file_bytes} bytes"
        )
    return PoolDescription(
        path=segment_file(first.page_table_memory.name),
        file_bytes=file_bytes,
        table_offset=table,
        device_uuid=first.cuda_ipc.device_uuid,
        handle=first.cuda_ipc.handle,
        pool_offset=first.cuda_ipc.byte_offset,
        pool_bytes=first.cuda_ipc.byte_size,
        pages=first.cuda_ipc.byte_size // first.page_stride,
        page_size=first.page_size,
        page_stride=first.page_stride // size,
        dtype=response.dtype,
        heads=first.heads,
        capacity=first.capacity,
        head_dim=first.head_dim,
        generation=response.generation,
        layers={layer: (planes[layer, False], planes[layer, True]) for layer in numbers},
    )


def _common(segment: kv_pb2.KvSegment) -> tuple[object, ...]:
    """What all segments of a cache share."""
    memory, file = segment.cuda_ipc, segment.page_table_memory
    return (
        *(memory.device_uuid, memory.handle, memory.byte_offset, memory.byte_size),
        *(file.name, file.byte_size, segment.page_table_offset),
        *(segment.heads, segment.capacity, segment.head_dim),
        *(segment.page_size, segment.page_stride),
    )


def _plane(segment: kv_pb2.KvSegment, size: int) -> Plane:
    shape = (segment.heads, segment.page_size, segment.head_dim)
    if segment.WhichOneof("memory") != "cuda_ipc" or not all(shape):
        raise KvNotShared(f"the verifier described KV of the shape {shape} that is on no GPU")
    strides = (segment.head_stride, segment.position_stride)
    row = segment.head_dim * size
    steps = sum((n - 1) * step for n, step in zip(shape, strides, strict=False))
    end = segment.offset + steps + row
    stride, pool = segment.page_stride, segment.cuda_ipc.byte_size
    if not end <= stride <= pool or strides[1] < row or segment.page_size > _MOST_PAGE:
        raise KvNotShared(
            f"the verifier described pages of {stride} bytes with KV up to byte {end} and strides "
            f"{strides}, in a pool of {pool} bytes"
        )
    offset = segment.cuda_ipc.byte_offset
    if offset % 16 or any(number % size for number in (pool, segment.offset, stride, *strides)):
        raise KvNotShared(f"offset {segment.offset} or a stride splits elements of {size} bytes")
    return Plane(segment.offset // size, *(step // size for step in strides))
