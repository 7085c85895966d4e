"""Checks a verifier's description of its memory before anything is mapped or read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from paceline.drafter.kv.errors import KvNotShared
from paceline.kernels.cache_rows import row_width
from paceline.kv.segment import HEADER_BYTES, TAP_AHEAD, segment_path
from paceline.kv.wire import KV_TYPES, STATE_TYPES
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
    """Type of hidden states, one of ``STATE_TYPES``."""


@dataclass(frozen=True)
class KvDescription:
    """A consistent description of keys and values, not compared with the memory yet."""

    file: FileDescription
    capacity: int
    """Positions. Unit: tokens."""

    dtype: torch.dtype
    """Type of keys and values; int8 as in :mod:`paceline.kernels.cache_rows`."""

    layer_bytes: int
    """Keys and values of one layer, for the whole capacity. Unit: bytes."""

    layers: dict[int, tuple[Array, Array]]
    """Keys and values by layer, ``[heads, capacity, row_width]``; with pages ``[heads, page_size,
    head_dim]`` of page 0."""

    pages: kv_pb2.KvPages
    """The pool of pages on a GPU and the page table in the file; empty without pages."""


def read_kv(response: kv_pb2.MapCacheResponse, *, paged: bool) -> KvDescription:
    """Check the description of keys and values.

    Args:
        response: The verifier's response.
        paged: Whether they have to lie in pages on a GPU, or in shared memory.

    Raises:
        KvNotShared: It contradicts itself, leads out of the memory, or describes other memory.
    """
    file, kv = _file(response), response.kv
    if kv.HasField("pages") != paged:
        raise KvNotShared(f"the verifier's KV is {'not ' * paged}in pages on a GPU")
    dtype = _kv_dtype(kv, file)
    size, width = dtype.itemsize, row_width(kv.head_dim, dtype)
    begin, end, positions = HEADER_BYTES, file.byte_size, kv.capacity
    if paged:
        _check_pages(kv, file, size)
        begin, end, positions = 0, kv.pages.page_stride, kv.pages.page_size
    shape, strides = (kv.heads, positions, width), (kv.head_stride, kv.position_stride)
    layers = {
        each.layer: (
            Array.inside(begin, end, each.key_offset, shape, strides, size),
            Array.inside(begin, end, each.value_offset, shape, strides, size),
        )
        for each in kv.layers
    }
    if not layers or len(layers) != len(kv.layers):
        raise KvNotShared("the verifier described no layer, or one of them twice")
    layer_bytes = 2 * kv.heads * kv.capacity * width * size
    return KvDescription(file, kv.capacity, dtype, layer_bytes, layers, kv.pages)


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
    file, states = _file(response), response.hidden_states
    offsets = {each.layer: each.offset for each in states.layers}
    if len(offsets) != len(states.layers) or set(offsets) != set(layers):
        raise KvNotShared(
            f"the verifier described hidden states of layers {sorted(offsets)}, expected each of "
            f"{sorted(layers)} once"
        )
    if states.slots < window + TAP_AHEAD:
        raise KvNotShared(
            f"the verifier keeps {states.slots} hidden states, expected at least "
            f"{window + TAP_AHEAD}"
        )
    shape, strides = (states.slots, states.hidden_size), (states.position_stride,)
    size = STATE_TYPES[file.dtype].itemsize
    return file, [
        Array.inside(HEADER_BYTES, file.byte_size, offsets[layer], shape, strides, size)
        for layer in layers
    ]


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


def _file(response: kv_pb2.MapCacheResponse) -> FileDescription:
    if response.dtype not in STATE_TYPES:
        raise KvNotShared(
            f"the verifier's hidden states have the type number {response.dtype}, expected one of "
            f"{sorted(STATE_TYPES)}: float32, float16, bfloat16"
        )
    if not response.generation:
        raise KvNotShared("the verifier named no generation")
    try:
        path = segment_path(response.file.name.removeprefix("/"))
    except ValueError as error:
        raise KvNotShared(f"the verifier named memory that cannot be mapped: {error}") from error
    return FileDescription(path, response.file.byte_size, response.generation, response.dtype)


def _kv_dtype(kv: kv_pb2.KvLayout, file: FileDescription) -> torch.dtype:
    number = kv.dtype or file.dtype
    if number not in KV_TYPES or (kv.HasField("pages") and number not in STATE_TYPES):
        raise KvNotShared(
            f"the verifier's KV has the type number {number}, expected one of {sorted(KV_TYPES)}: "
            "float32, float16, bfloat16, int8 (not in pages)"
        )
    return KV_TYPES[number]


def _check_pages(kv: kv_pb2.KvLayout, file: FileDescription, size: int) -> None:
    """Check that pages lie in the pool, and the page table in the file.

    Raises:
        KvNotShared: They do not, or an offset or stride splits elements.
    """
    pages, pool = kv.pages, kv.pages.memory
    if not 0 < pages.page_size <= _MAX_PAGE_SIZE or not 0 < pages.page_stride <= pool.byte_size:
        raise KvNotShared(
            f"the verifier described pages of {pages.page_size} positions and {pages.page_stride} "
            f"bytes, in a pool of {pool.byte_size} bytes"
        )
    if pool.byte_offset % 16 or pool.byte_size % size or pages.page_stride % size:
        raise KvNotShared(f"the pool's offset, size or stride splits elements of {size} bytes")
    if kv.capacity % pages.page_size or not kv.capacity:
        raise KvNotShared(f"a capacity of {kv.capacity} is not a number of whole pages")
    end = pages.table_offset + 4 * (kv.capacity // pages.page_size)
    if pages.table_offset < HEADER_BYTES or pages.table_offset % 4 or end > file.byte_size:
        raise KvNotShared(
            f"the verifier described a page table at byte {pages.table_offset}, in a file of "
            f"{file.byte_size} bytes"
        )
