"""Rows of KV caches: a head's values at one position, as floats or in 8 bits.

An int8 cache is ``[Hkv, capacity, D + 4]``: D signed bytes, and the last four the float32 by which
they are multiplied. So what moves rows does not depend on the type. ``native/cache_rows.h`` has the
rule of rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_LARGEST = 127
_LEAST = 2.0**-100


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Elements of a row with heads of ``dim`` values in a cache of this type."""
    return dim + SCALE_BYTES if dtype is torch.int8 else dim


def to_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats ``[..., D]`` as rows of a cache of this type."""
    if dtype is not torch.int8:
        return values.to(dtype)
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    scale = torch.where(largest >= _LEAST, largest / _LARGEST, 0.0)
    numbers = (values * scale.reciprocal()).round().nan_to_num(0.0, 0.0, 0.0)
    whole = scale.isfinite() & (scale > 0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return torch.cat([(numbers * whole).to(torch.int8), scale.view(torch.int8)], -1)


def from_rows(rows: Tensor) -> Tensor:
    """The values of rows: float32 ``[..., D]`` of int8 rows, others as they are."""
    if rows.dtype is not torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES] * scale
