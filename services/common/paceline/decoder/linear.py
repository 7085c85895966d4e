"""Linear layers: the bits of a row do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.decoder.onednn import multiplies_bfloat16
from paceline.decoder.quantised import Weight
from paceline.kernels.blocks import Blocks

_PACK_ROWS = 64  # batch size that the packed layout is chosen for; the bits do not depend on it
MOST_ROWS = 513
"""Most rows of one product."""

_linear: Callable[..., Tensor] | None
try:
    _linear = torch.ops.mkldnn._linear_pointwise.default
except AttributeError:  # a build of torch without oneDNN
    _linear = None


def product_type(weight: Tensor) -> torch.dtype | None:
    """Type in which oneDNN multiplies with this weight; None if it does not.

    float32 replaces bfloat16 if the processor has no bfloat16 products: twice the memory, and the
    same result as exact sums rounded once.
    """
    if weight.device.type != "cpu" or _linear is None:
        return None
    if weight.dtype == torch.bfloat16 and not multiplies_bfloat16():
        return torch.float32
    return weight.dtype if weight.dtype in (torch.float32, torch.bfloat16) else None


def product_rows(rows: int) -> int:
    """Number of rows that a packed product is padded to, at most an eighth more.

    oneDNN compiles and caches a kernel for every number of rows: milliseconds at the first use, and
    half a MiB of memory. So only 56 numbers are used: up to 16 rows each number itself, above it
    one more than multiples of a step, as for an anchor with its nodes. More rows than ``MOST_ROWS``
    are split into several products.
    """
    if rows > MOST_ROWS:
        rest = rows % MOST_ROWS
        return rows - rest + (product_rows(rest) if rest else 0)
    if rows <= 16:
        return max(rows, 2)  # oneDNN splits the sums of a single row, which changes its bits
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-(rows - 1) // step) * step + 1


def pad_rows(x: Tensor) -> Tensor:
    """``[rows, n]`` padded with zeros to :func:`product_rows` rows."""
    more = product_rows(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x


class Linear:
    """``x @ weight.T + bias``, with the weight prepacked for oneDNN on the CPU.

    A packed product is faster for few rows, and the bits of a row do not depend on their number.
    """

    def __init__(self, matrix: Weight, bias: Tensor | None = None) -> None:
        """Make a layer from a weight ``[out, in]``, packed or not, and a bias ``[out]``."""
        weight = matrix.dequantise() if isinstance(matrix, Blocks) else matrix
        self.out_features, self.in_features = weight.shape
        dtype = product_type(weight)
        self.packed = dtype is not None
        if dtype is not None and not weight.is_mkldnn:
            weight = weight.to(dtype).contiguous()
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self.weight = weight
        """Packed if :attr:`packed`, and then of the type it is multiplied in."""
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
