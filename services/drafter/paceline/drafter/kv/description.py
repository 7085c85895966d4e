"""What a verifier says about where KV lies, checked before anything is done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.drafter.kv.errors import KvNotShared
from paceline.shm import HEADER_BYTES, segment_path
from paceline.v1 import kv_pb2

ELEMENT_BYTES = {
    kv_pb2.KV_DTYPE_FLOAT32: 4,
    kv_pb2.KV_DTYPE_FLOAT16: 2,
    kv_pb2.KV_DTYPE_BFLOAT16: 2,
}
"""Types that can be mapped. The others come with scales, for which a mapping has no place."""


@dataclass(frozen=True)
class Plane:
    """Keys or values of one layer, ``[heads, capacity, head_dim]``. Unit: elements."""

    offset: int
    head_stride: int
    position_stride: int


@dataclass(frozen=True)
class KvDescription:
    """A description that is sound in itself: every element lies inside the file, past its header.

    Nothing in it was compared with the file yet.
    """

    path: Path
    """The file; by its name a KV segment."""

    byte_size: int
    """Size it must have. Unit: bytes."""

    dtype: kv_pb2.KvDtype
    """One of ELEMENT_BYTES."""

    heads: int
    capacity: int
    """Positions. Unit: tokens."""

    head_dim: int
    generation: int
    layers: dict[int, tuple[Plane, Plane]]
    """Keys and values, by layer."""


def read_description(response: kv_pb2.MapCacheResponse) -> KvDescription:
    """Check and convert a verifier's answer.

    Raises:
        KvNotShared: It contradicts itself, leads out of the file, or to no segment, or asks for
            what is not built (paged or CUDA memory, scaled types).
    """
    if not response.segments:
        raise KvNotShared("the verifier described no segment")
    if response.dtype not in ELEMENT_BYTES:
        raise KvNotShared(
            f"the verifier's KV has the type number {response.dtype}, expected one of "
            f"{sorted(ELEMENT_BYTES)}: float32, float16, bfloat16"
        )
    if not response.generation:
        raise KvNotShared("the verifier named no generation")
    first = response.segments[0]
    planes: dict[tuple[int, bool], Plane] = {}
    for segment in response.segments:
        if _common(segment) != _common(first):
            raise KvNotShared("the verifier described segments that differ in memory or shape")
        key = (segment.layer, segment.is_value)
        if key in planes:
            raise KvNotShared(f"the verifier described layer {segment.layer} twice")
        planes[key] = _plane(segment, ELEMENT_BYTES[response.dtype])
    numbers = {layer for layer, _ in planes}
    if len(planes) != 2 * len(numbers):
        raise KvNotShared("the verifier described keys without values, or values without keys")
    return KvDescription(
        path=segment_file(first.posix.name),
        byte_size=first.posix.byte_size,
        dtype=response.dtype,
        heads=first.heads,
        capacity=first.capacity,
        head_dim=first.head_dim,
        generation=response.generation,
        layers={layer: (planes[layer, False], planes[layer, True]) for layer in numbers},
    )


def _common(segment: kv_pb2.KvSegment) -> tuple[object, ...]:
    """What all segments of a cache share."""
    memory = (segment.posix.name, segment.posix.byte_size)
    return (*memory, segment.heads, segment.capacity, segment.head_dim)


def segment_file(name: str) -> Path:
    """The file of a shared-memory name.

    Raises:
        KvNotShared: It is no segment's.
    """
    try:
        return segment_path(name.removeprefix("/"))
    except ValueError as error:
        raise KvNotShared(f"the verifier named a memory that is no segment: {error}") from error


def _plane(segment: kv_pb2.KvSegment, element_bytes: int) -> Plane:
    if segment.WhichOneof("memory") != "posix" or segment.page_table or segment.page_size:
        raise KvNotShared("the verifier's KV is not contiguous POSIX shared memory")
    shape = (segment.heads, segment.capacity, segment.head_dim)
    if not all(shape):
        raise KvNotShared(f"the verifier described KV of the shape {shape}, expected none to be 0")
    start = segment.offset
    strides = (segment.head_stride, segment.position_stride)
    row = segment.head_dim * element_bytes
    end = start + sum((n - 1) * step for n, step in zip(shape, strides, strict=False)) + row
    size = segment.posix.byte_size
    # Strides are bounded too where they go unused (one head, one position): torch must hold them.
    if start < HEADER_BYTES or end > size or max(strides) > size or strides[1] < row:
        raise KvNotShared(
            f"the verifier described KV from byte {start} to {end}, with strides {strides}, in a "
            f"file of {size} bytes with a header of {HEADER_BYTES}"
        )
    if any(number % element_bytes for number in (start, *strides)):
        raise KvNotShared(f"offset {start} or strides {strides} split elements of {element_bytes}")
    return Plane(start // element_bytes, *(step // element_bytes for step in strides))
