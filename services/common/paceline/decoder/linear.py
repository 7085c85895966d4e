"""Linear layers whose rows do not depend on one another, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PACK_ROWS = 64  # batch size the packed layout is chosen for; any other gives the same bits
MOST_ROWS = 513
"""Most rows of one product."""

_linear: Callable[..., Tensor] | None
try:
    _linear = torch.ops.mkldnn._linear_pointwise.default
except AttributeError:  # a build of torch without oneDNN
    _linear = None


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can prepack this weight: CPU, float32 or bfloat16."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and _linear is not None
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


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
        """Take over a weight ``[out, in]``, packed or not, and a bias ``[out]`` of its type."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = can_pack(weight)
        if self.packed and not weight.is_mkldnn:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self.weight = weight
        """Packed, if it is."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in]`` to ``[rows, out]``."""
        if self.packed and _linear is not None:
            parts = [
                _linear(part, self.weight, self.bias, "none", [], "")
                for part in pad_rows(x).split(MOST_ROWS)
            ]
            return (parts[0] if len(parts) == 1 else torch.cat(parts))[: x.shape[0]]
        return torch.nn.functional.linear(x, self.weight, self.bias)
