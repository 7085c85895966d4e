"""Addresses and strides of keys and values, in the form that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.paged import PagedPlane, Plane
from paceline.kernels.trees import TreePlan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ALIGN = 16


@dataclass(frozen=True)
class Caches:
    """Keys and values of one layer for every sequence of a plan.

    Attributes:
        keys: The tensor that all key offsets are relative to.
        values: Likewise.
        kv_heads: Key/value heads.
        dim: Elements a head.
        page_size: Slots a page; 0: every sequence is contiguous.
        strides: Of keys, then of values: between pages, heads, slots; zeros where contiguous.
        tables: Page tables, int32 ``[rows, n]``; unused for contiguous caches.
        align: All origins and strides in ``origins`` are multiples of it. Unit: elements.
        origins: Origin, head stride and slot stride per sequence of keys and values, int64
            ``[n, 2, 3]``; unused for paged caches. Unit: elements.
        sequences: Row of the page tables of each sequence, or its number.
    """

    keys: Tensor
    values: Tensor
    kv_heads: int
    dim: int
    page_size: int
    strides: tuple[int, ...]
    tables: Tensor
    align: int
    origins: Tensor
    sequences: tuple[int, ...]

    @classmethod
    def of(cls, keys: Sequence[Plane], values: Sequence[Plane], plan: TreePlan) -> Caches:
        """Describe the caches of one call.

        Raises:
            ValueError: They differ in type or pool, or the type has no kernels.
        """
        paged = [plane for plane in (*keys, *values) if isinstance(plane, PagedPlane)]
        if not paged:
            return _contiguous([k for k in keys if isinstance(k, Tensor)],
                               [v for v in values if isinstance(v, Tensor)], plan)  # fmt: skip
        rows = tuple(plane.row for plane in keys if isinstance(plane, PagedPlane))
        first_key, first_value = keys[0], values[0]
        if (
            len(paged) != len(keys) + len(values)
            or not isinstance(first_key, PagedPlane)
            or not isinstance(first_value, PagedPlane)
            or len({plane.pool.data_ptr() for plane in paged}) > 2
            or len({plane.tables.data_ptr() for plane in paged}) > 1
        ):
            raise ValueError("all caches of one call must lie in one pool, or none in any")
        key_pool, value_pool = first_key.pool, first_value.pool
        _check_dtypes({key_pool.dtype, value_pool.dtype})
        if "no origins" not in plan.prepared:
            none = torch.zeros(2, 3, dtype=torch.int64, device=key_pool.device)
            plan.prepared["no origins"] = none
        return cls(
            key_pool, value_pool, key_pool.shape[1], key_pool.shape[3], key_pool.shape[2],
            (*key_pool.stride()[:3], *value_pool.stride()[:3]),
            first_key.tables, 1, plan.prepared["no origins"], rows,
        )  # fmt: skip


def _contiguous(keys: Sequence[Tensor], values: Sequence[Tensor], plan: TreePlan) -> Caches:
    _check_dtypes({each.dtype for each in (*keys, *values)})
    bases = (keys[0], values[0])
    where = tuple(
        (_distance(each, base), *each.stride()[:2])
        for pair in zip(keys, values, strict=True)
        for each, base in zip(pair, bases, strict=True)
    )
    if where not in plan.prepared:  # shared with the row kernels
        origins = torch.tensor(where, dtype=torch.int64).to(keys[0].device)
        plan.prepared[where] = origins, origins.new_zeros(4, dtype=torch.int32)
    origins, tables = plan.prepared[where]
    aligned = not any(number % _ALIGN for row in where for number in row)
    return Caches(
        keys[0], values[0], keys[0].shape[0], keys[0].shape[2], 0, (0,) * 6,
        tables.view(1, 4), _ALIGN if aligned else 1, origins, tuple(range(len(keys))),
    )  # fmt: skip


def _distance(tensor: Tensor, base: Tensor) -> int:
    """Distance between two tensors' addresses. Unit: elements."""
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


def _check_dtypes(dtypes: set[torch.dtype]) -> None:
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        raise ValueError(
            f"keys and values have the types {sorted(map(str, dtypes))}, expected one of "
            f"{', '.join(map(str, _DTYPES))} for all"
        )
