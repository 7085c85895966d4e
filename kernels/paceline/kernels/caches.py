"""KV caches: rows of 8 bits, pages of a pool, and how programs see the caches of a sequence.

A row is a head's values at one position, as floats or in 8 bits. An int8 cache is ``[Hkv, capacity,
D + 4]``: D signed bytes, and the last four the float32 by which they are multiplied. So what moves
rows does not depend on the type. ``native/cache_rows.h`` has the rule of rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels._native import address
from paceline.kernels.structures import CCache

# Elements of a head at most for the Triton kernels: a tile of it fits every GPU. Tiles are as wide
# as a power of two, and tiles of 512 elements fit none in 16 bits: they take 256 KiB of shared
# memory, of which a program on an H100 has 227. In float32 they take 161 KiB, which few GPUs have.
MAX_GPU_WIDTH = 256
SCALE_BYTES = 4
_LARGEST = 127
_MIN_LARGEST = 2.0**-100


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Return how many elements a row with heads of ``dim`` values has in a cache of this type."""
    return dim + SCALE_BYTES if dtype is torch.int8 else dim


def to_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floats ``[..., D]`` as rows of a cache of this type."""
    if dtype is not torch.int8:
        return values.to(dtype)
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest >= _MIN_LARGEST, largest / _LARGEST, 0.0)
    numbers = (values * scale.reciprocal()).round().nan_to_num(0.0, 0.0, 0.0)
    whole = scale.isfinite() & (scale > 0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return torch.cat([(numbers * whole).to(torch.int8), scale.view(torch.int8)], -1)


def from_rows(rows: Tensor) -> Tensor:
    """Return the values of rows: float32 ``[..., D]`` of int8 rows, others as they are."""
    if rows.dtype is not torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES] * scale


@dataclass(frozen=True)
class PagedPlane:
    """Keys or values of one layer of one sequence, addressed through a page table.

    Slot s is in page ``tables[row, s // page_size]`` of the pool, at ``s % page_size``. With a page
    size of 1 the table lists single slots of the pool: sparse attention.
    """

    pool: Tensor  # `[pages, Hkv, page_size, D]`, any strides with a dense last dimension
    tables: Tensor  # page tables of all sequences, int32 `[rows, n]`, dense, on the pool's device
    row: int  # the table of this sequence
    capacity: int  # slots with pages. Unit: tokens.

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.pool.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the pool."""
        return self.pool.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(Hkv, capacity, D)``, the shape of a contiguous cache."""
        return self.pool.shape[1], self.capacity, self.pool.shape[3]

    def gather(self, slots: Tensor) -> Tensor:
        """A copy of some slots. ``slots``: int64 ``[n]`` on the pool's device. Returns ``[Hkv, n,
        D]``."""
        pages = self.tables[self.row, slots // self.page_size].long()
        return self.pool[pages, :, slots % self.page_size].transpose(0, 1)


# Keys or values of a layer and sequence: `[Hkv, capacity, D]`, or the same in pages; see
# `paceline.kernels.caches` for int8.
Plane = Tensor | PagedPlane


def head_width(plane: Plane) -> int:
    return plane.shape[2] - row_width(0, plane.dtype)


def span(plane: Plane, start: int, stop: int) -> Tensor:
    """Return slots from ``start`` to ``stop``, ``[Hkv, n, D]``: a view, or a copy of paged ones."""
    if isinstance(plane, PagedPlane):
        return plane.gather(torch.arange(start, stop, device=plane.pool.device))
    return plane[:, start:stop]


class KVCacheView(Protocol):
    """The KV cache of one sequence.

    Slot s holds the key and value of position s for committed tokens. The decoder writes the query
    block's to the slots after them.
    """

    @property
    def table(self) -> LayerTable | None:
        """Addresses of all layers, made anew when the memory changes; None: KV in pages, or not on
        the CPU."""

    def layer(self, index: int) -> tuple[Plane, Plane]:
        """Return keys and values of a layer, each ``[Hkv, capacity, D]``, writable, last dim dense;
        int8 as in :mod:`paceline.kernels.caches`."""


class LayerTable:
    """Addresses and strides of the keys and values of one sequence, for compiled programs.

    The memory must outlive the table's use: the cache keeps both.
    """

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor, Tensor]]) -> LayerTable | None:
        """Return the table of planes; None if they are not on the CPU."""
        return cls(layers) if layers[0][0].is_cpu else None

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make the table of planes ``[Hkv, capacity, D]`` of one shape and type, on the CPU. Raises
        ``ValueError``: shapes or types differ, or a last dimension is not dense."""
        first = layers[0][0]
        self.layers = len(layers)  # number of layers
        self.dtype = first.dtype  # type of keys and values
        self.heads = first.shape[0]  # kv heads of every layer
        self.capacity = first.shape[1]  # slots of every layer
        self.dim = head_width(first)  # width of a head
        self._rows = (CCache * (2 * len(layers)))()
        # Address of the C array `Cache [layers][2]`, keys then values.
        self.address = ctypes.addressof(self._rows)
        for index, plane in enumerate(plane for both in layers for plane in both):
            if (plane.shape, plane.dtype, plane.stride(2)) != (first.shape, first.dtype, 1):
                raise ValueError(
                    f"a plane is {plane.dtype} {tuple(plane.shape)} with strides {plane.stride()}, "
                    f"expected {self.dtype} {tuple(first.shape)} with a dense last dimension"
                )
            self._rows[index] = CCache(
                address(plane, "a cache"), *plane.stride()[:2], self.capacity
            )
