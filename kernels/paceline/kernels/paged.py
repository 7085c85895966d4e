"""Paged keys and values in a pool that many sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cache_rows import row_width, to_rows
from paceline.kernels.trees import TreePlan


@dataclass(frozen=True)
class PagedPlane:
    """Keys or values of one layer of one sequence, addressed through a page table.

    Slot s is in page ``tables[row, s // page_size]`` of the pool, at ``s % page_size``. With a page
    size of 1 the table lists single slots of the pool: sparse attention.

    Attributes:
        pool: ``[pages, Hkv, page_size, D]``, any strides with a dense last dimension.
        tables: Page tables of all sequences, int32 ``[rows, n]``, dense, on the pool's device.
        row: The table of this sequence.
        capacity: Slots with pages. Unit: tokens.
    """

    pool: Tensor
    tables: Tensor
    row: int
    capacity: int

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
        """A copy of some slots.

        Args:
            slots: int64 ``[n]`` on the pool's device.

        Returns:
            ``[Hkv, n, D]``.
        """
        return self.pool[self._pages(slots), :, slots % self.page_size].transpose(0, 1)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Fill slots, int64 ``[n]``, with ``[Hkv, n, D]``, converted to the pool's type."""
        rows = rows.transpose(0, 1).to(self.pool.dtype)
        self.pool[self._pages(slots), :, slots % self.page_size] = rows

    def _pages(self, slots: Tensor) -> Tensor:
        return self.tables[self.row, slots // self.page_size].long()


Plane = Tensor | PagedPlane
"""Keys or values of a layer and sequence: ``[Hkv, capacity, D]``, or the same in pages; see
:mod:`paceline.kernels.cache_rows` for int8."""


def head_width(plane: Plane) -> int:
    """Width of a head."""
    return plane.shape[2] - row_width(0, plane.dtype)


def span(plane: Plane, start: int, stop: int) -> Tensor:
    """Slots from ``start`` to ``stop``, ``[Hkv, n, D]``: a view, or a copy of paged ones."""
    if isinstance(plane, PagedPlane):
        return plane.gather(torch.arange(start, stop, device=plane.pool.device))
    return plane[:, start:stop]


def write(plane: Plane, start: int, rows: Tensor) -> None:
    """Fill the slots from ``start`` on with ``[Hkv, n, D]``, converted to the plane's type."""
    if isinstance(plane, PagedPlane):
        plane.write(torch.arange(start, start + rows.shape[1], device=rows.device), rows)
    else:
        plane.narrow(1, start, rows.shape[1]).copy_(to_rows(rows, plane.dtype))


def as_tensors(planes: Sequence[Plane], plan: TreePlan) -> list[Tensor]:
    """Contiguous copies of paged planes, up to the last slot that the plan attends to."""
    stops = [0] * len(planes)
    for segment in plan.segments:
        stops[segment.sequence] = max(stops[segment.sequence], segment.stop)
    return [span(plane, 0, stop).contiguous() if isinstance(plane, PagedPlane) else plane
            for plane, stop in zip(planes, stops, strict=True)]  # fmt: skip
