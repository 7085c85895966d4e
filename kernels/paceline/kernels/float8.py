"""Linear layers of 8-bit floats (e4m3), weights and inputs, with a scale a row.

A product is one call of ``torch._scaled_mm``, with sums in float32. It is for GPUs; on a CPU, where
it is slow, it gives the same up to the order of sums.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 2.0**-100
"""Rows with smaller values only are scaled as if this was the largest."""

_MULTIPLE = 16  # of both sides of a matrix, for the GPU's products
_CAPABILITY = (8, 9)


def why_unsupported(device: torch.device | str) -> str:
    """Why a device has no such products, and what to do; empty if it has them, or is no GPU."""
    device = torch.device(device)
    if device.type == "cpu":
        return "fp8 is for NVIDIA GPUs: use int8 on a CPU"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        return (
            f"fp8 needs a GPU of compute capability 8.9 or higher (Ada, Hopper and newer), and "
            f"{device} has {found[0]}.{found[1]}: use bfloat16"
        )
    return ""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row so that its largest value becomes 448, and round it.

    Args:
        x: ``[rows, width]`` of a float type, dense.

    Returns:
        float8_e4m3fn ``[rows, width]`` and the factors to multiply it with, float32 ``[rows, 1]``.
        A row depends on nothing else than the row.
    """
    if x.device.type in ("cuda", "meta"):
        with suppress(ImportError):
            from paceline.kernels._triton.backend import scaled_rows

            return scaled_rows(x, LARGEST, SMALLEST, torch.float8_e4m3fn)
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST)
    return (wide * (LARGEST / largest)).to(torch.float8_e4m3fn), largest / LARGEST


@dataclass(frozen=True)
class Float8Matrix:
    """A matrix of weights.

    Attributes:
        values: float8_e4m3fn ``[outs, ins]``.
        scale: Factor on each output, float32 ``[1, outs]``.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantise ``[outs, ins]`` of a float type.

        Raises:
            ValueError: The number of inputs or outputs is not a multiple of 16.
        """
        if any(size % _MULTIPLE for size in weight.shape):
            raise ValueError(
                f"it has {weight.shape[1]} inputs and {weight.shape[0]} outputs, expected "
                f"multiples of {_MULTIPLE}"
            )
        values, scale = quantise_rows(weight.contiguous())
        return cls(values, scale.T)

    @property
    def shape(self) -> tuple[int, int]:
        """``(outs, ins)``."""
        return self.values.shape[0], self.values.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + bias``: bfloat16 ``[rows, ins]``, dense, to ``[rows, outs]``."""
        values, scale = quantise_rows(x)
        return torch._scaled_mm(
            values, self.values.T, scale, self.scale, bias=bias, out_dtype=torch.bfloat16
        )
