"""Linear layers whose rows do not depend on one another, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.decoder.onednn import multiplies_bfloat16

_PACK_ROWS = 64  # batch size the packed layout is chosen for; any other gives the same bits
MOST_ROWS = 513
"""Most rows of one product."""

_linear: Callable[..., Tensor] | None
try:
    _linear = torch.ops.mkldnn._linear_pointwise.default
except AttributeError:  # a build of torch without oneDNN
    _linear = None


def product_type(weight: Tensor) -> torch.dtype | None:
    """Type in which oneDNN multiplies with this weight; None: it does not.

    float32 stands in for bfloat16 where the processor has no products of that: twice the memory,
    and the same result as exact sums rounded once.
    """
    if weight.device.type != "cpu" or _linear is None:
        return None
    if weight.dtype == torch.bfloat16 and not multiplies_bfloat16():
        return torch.float32
    return weight.dtype if weight.dtype in (torch.float32, torch.bfloat16) else None


def product_rows(rows: int) -> int:
    """How many rows a packed product of this many is run with: at most an eighth more.

    oneDNN compiles a kernel for every number of rows it meets and keeps it: milliseconds at the
    first use, half a MiB for good. These numbers are few, 56 in all: more rows than ``MOST_ROWS``
    make several products. Up to 16 rows each number is its own; beyond, they are one more than
    multiples, as an anchor with its nodes is.
    """
    if rows > MOST_ROWS:
        rest = rows % MOST_ROWS
        return rows - rest + (product_rows(rest) if rest else 0)
    if rows <= 16:
        return max(rows, 2)  # one row alone takes a path that splits long sums, with other bits
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-(rows - 1) // step) * step + 1


def pad_rows(x: Tensor) -> Tensor:
    """``[rows, n]`` with rows of zeros behind, as many as :func:`product_rows` adds."""
    more = product_rows(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x


class Linear:
    """``x @ weight.T + bias``, prepacked for oneDNN on the CPU.

    Packed, it is faster at few rows and every row has the same bits whatever the number of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take over a weight ``[out, in]``, packed or not, and a bias ``[out]``."""
        self.out_features, self.in_features = weight.shape
        dtype = product_type(weight)
        self.packed = dtype is not None
        if dtype is not None and not weight.is_mkldnn:
            weight = weight.to(dtype).contiguous()
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self.weight = weight
        """Packed, if it is; then of the type it is multiplied in."""
        self.bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]`` in the type of ``x``."""
        if self.packed and _linear is not None:
            parts = [
                _linear(part, self.weight, self.bias, "none", [], "")
                for part in pad_rows(x.to(self.weight.dtype)).split(MOST_ROWS)
            ]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
            return out[: x.shape[0]].to(x.dtype)
        return torch.nn.functional.linear(x, self.weight, self.bias)
