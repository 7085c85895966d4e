"""Linear layers in torch operations, where there are no compiled kernels.

Quantised formats give the bits of ``native/linear.h``; float formats give other bits, which do not
depend on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.blocks import BLOCK, Blocks

_ROWS = 64
_LEAST = 2.0**-100


def multiply_floats(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + bias`` in products of ``_ROWS`` rows: BLAS picks its kernel by their number."""
    rows = len(x)
    parts = torch.nn.functional.pad(x, (0, 0, 0, -rows % _ROWS)).split(_ROWS)
    return torch.cat([torch.nn.functional.linear(part, weight, bias) for part in parts])[:rows]


def multiply_blocks(x: Tensor, blocks: Blocks, bias: Tensor | None) -> Tensor:
    """The same for quantised weights, see ``native/linear.h``."""
    rows, outs, count = len(x), blocks.shape[0], x.shape[1] // BLOCK
    a, a_scale = _quantise_activations(x.view(rows, count, BLOCK))
    values = (blocks.values.float() - blocks.offset).view(outs, count, BLOCK)
    # Sums of a block are whole numbers below 2^24: exact in float32, in any order.
    sums = torch.bmm(a.transpose(0, 1), values.permute(1, 2, 0))
    a_sums = a_scale * a.sum(2)
    total = torch.zeros(rows, outs)
    for b in range(count):
        scaled = sums[b] * blocks.scale[:, b] + 0.0  # no negative zero, as fma(sum, scale, 0)
        total = _fma(scaled, a_scale[:, b, None].expand(rows, outs), total)
        if blocks.minimum is not None:
            total = _fma(blocks.minimum[:, b].expand(rows, outs), a_sums[:, b, None], total)
    return total if bias is None else total + bias


def _quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers ``[rows, blocks, 32]`` and scales ``[rows, blocks]``."""
    largest = x.abs().amax(2)
    finite = x.isfinite().all(2)
    scale = torch.where(finite & (largest >= _LEAST), largest / 127, 0.0)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    a = torch.where(finite[:, :, None], x, 0.0) * inverse[:, :, None]
    return a.round(), torch.where(finite, scale, torch.nan)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c``, rounded once to float32.

    The product is exact in float64 and its sum is rounded to odd (Boldo and Melquiond 2008), so the
    second rounding cannot change the result.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    outwards = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & error.isfinite() & (bits & 1 == 0)
    return torch.where(inexact, bits + outwards, bits).view(torch.float64).float()
