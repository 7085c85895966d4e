"""Linear layers in 8-bit integers with one scale an output and one a row, over rotated inputs.

Sums of products are integers, so they are exact in any order: every library, every processor and
any number of rows give the same bits. Only three steps round, each in the one order that this
module defines, without fused operations:

1. The inputs of a row are rotated: a Hadamard transform of each block of ``size`` inputs, which
   spreads large values. Its stages combine inputs ``i`` and ``i + s`` to their sum and difference,
   for ``s`` = 1, 2, 4, ... in float32. Nothing is normalised: the scale of the row does that.
2. The row is divided by a scale so that its largest value becomes 127, and rounded to the nearest
   integer, ties to even.
3. The integer sum becomes float32, is multiplied by the row's scale, then by the output's, and the
   bias is added.

The weights are rotated in the same way when they are loaded, and divided by ``size``, a power of
two, so that the product is of the weights and inputs that were given.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels._native import address, library
from paceline.kernels.devices import kernels_for
from paceline.kernels.structures import MAX_ROTATED_INS, MAX_ROTATION

LARGEST = 127.0
SMALLEST = 2.0**-100  # rows with smaller values only are scaled as if this was the largest

# Most inputs: their sum fits an int32, of products with unsigned inputs too.
MAX_INS = MAX_ROTATED_INS

# Largest blocks of inputs that are rotated together: of products, of the down projection.
SIZE, DOWN_SIZE = 64, MAX_ROTATION
_MULTIPLE = 8  # of both sides of a matrix, for the GPU's products
_LEAST_ROWS = 32  # of the GPU's products
_CHUNK = 1 << 20  # weights that are quantised at once on a CPU


def block_size(ins: int, max_size: int) -> int:
    """Return the largest power of two up to ``max_size`` that divides a number of inputs."""
    return min(max_size, ins & -ins)


def rotates(ins: int) -> bool:
    """Return whether a matrix with this number of inputs can be quantised."""
    return ins % _MULTIPLE == 0 and ins <= MAX_INS


def quantise_rows(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rotate rows ``[rows, ins]`` of a float type, dense, ``size`` inputs together, scale each so
    that its largest value becomes 127, and round it.

    Returns int8 ``[rows, ins]`` and the factors to multiply it with, float32 ``[rows]``: NaN, with
    zeros, for a row with values that are not finite. A row depends on nothing else.
    """
    if not x.is_cpu:
        return kernels_for(x.device).quantise_rows(x, size)
    parts = x.split(max(1, _CHUNK // x.shape[1]))
    quantised = [quantise_rows_natively(library(), part, size) for part in parts]
    values, scales = zip(*quantised, strict=True)
    return torch.cat(values), torch.cat(scales)


def quantise_rows_natively(native: ctypes.CDLL, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """:func:`quantise_rows` by compiled kernels."""
    rows, ins = x.shape
    x = x.float().contiguous()
    values, scale = torch.empty(rows, ins, dtype=torch.int8), torch.empty(rows)
    native.paceline_quantise_rows(
        address(x, "x"), rows, ins, size, values.data_ptr(), scale.data_ptr()
    )
    return values, scale


@dataclass(frozen=True)
class IntSums:
    """A product before its scales; kernels that read it can scale it themselves."""

    sums: Tensor  # int32, at least `[M, N]`, dense
    rows: Tensor  # factors on the rows, float32 `[M]`
    outs: Tensor  # factors on the outputs, float32 `[N]`
    bias: Tensor | None  # float32 `[N]` or None
    dtype: torch.dtype  # data type of the product

    @property
    def shape(self) -> tuple[int, int]:
        """``(M, N)``."""
        return len(self.rows), len(self.outs)

    def scaled(self) -> Tensor:
        """Return the product, ``[M, N]``."""
        return scale_sums(self.sums, self.rows, self.outs, self.bias, self.dtype)


@dataclass(frozen=True)
class RotatedMatrix:
    """A matrix of weights."""

    values: Tensor  # int8 `[outs, ins]`, `outs` rounded up to a multiple of 8
    scale: Tensor  # factor on each output, float32 `[outs]`
    size: int  # inputs that are rotated together

    @classmethod
    def of(cls, weight: Tensor, max_size: int = SIZE) -> Self:
        """Rotate and quantise ``[outs, ins]`` of a float type, with blocks of :func:`block_size`.
        Raises ``ValueError``: the number of inputs is no multiple of 8, or too large."""
        ins = weight.shape[1]
        if not rotates(ins):
            raise ValueError(
                f"it has {ins} inputs, expected a multiple of {_MULTIPLE} up to {MAX_INS}"
            )
        size = block_size(ins, max_size)
        values, scale = quantise_rows(weight.contiguous(), size)
        return cls.stored(values, scale / size, size)

    @classmethod
    def stored(cls, values: Tensor, scale: Tensor, size: int) -> Self:
        """Take int8 ``[outs, ins]`` and its scales."""
        return cls(pad(values, (0, 0, 0, -len(scale) % _MULTIPLE)), scale, size)

    @property
    def shape(self) -> tuple[int, int]:
        """``(outs, ins)``."""
        return len(self.scale), self.values.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + bias``: ``[rows, ins]`` of a float type, dense, to ``[rows, outs]`` of it;
        ``bias`` is float32 ``[outs]``."""
        return self.sums(x, bias).scaled()

    def sums(self, x: Tensor, bias: Tensor | None) -> IntSums:
        """Return the product before the scales are multiplied."""
        rows = len(x)
        values, scale = quantise_rows(x, self.size)
        if rows < _LEAST_ROWS:
            values = pad(values, (0, 0, 0, _LEAST_ROWS - rows))
        sums = torch._int_mm(values, self.values.T)
        return IntSums(sums, scale, self.scale, bias, x.dtype)


def scale_sums(
    sums: Tensor, rows: Tensor, outs: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return outputs ``[M, N]`` in a type, of integer sums, int32, at least ``[M, N]``, dense, by
    factors on the rows, float32 ``[M]``, and on the outputs, float32 ``[N]``, and a bias, float32
    ``[N]`` or None."""
    return kernels_for(sums.device).scale_sums(sums, rows, outs, bias, dtype)
