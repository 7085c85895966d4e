"""Linear layers of weights in 8-bit integers and inputs in their own type, on GPUs.

They read half the bytes of bfloat16, which is what products of few rows cost. Unlike products of
integers (:mod:`paceline.kernels.rotated`) they quantise no inputs. The bits of a row may depend on
the number of rows, so these layers are for drafters, whose drafts need no exact bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from paceline.kernels import triton

_LARGEST = 127.0
_SMALLEST = 2.0**-100
_CHUNK = 1 << 26  # weights that are quantised at once


@dataclass(frozen=True)
class WeightOnlyMatrix:
    """A matrix of weights with one scale an output."""

    values: Tensor
    """int8 ``[outs, ins]``, dense."""

    scale: Tensor
    """Factor on each output, float32 ``[outs]``."""

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Quantise ``[outs, ins]`` of a float type: the largest weight of an output becomes 127."""
        values, scales = [], []
        for part in weight.split(max(1, _CHUNK // weight.shape[1])):
            wide = part.float()
            scale = wide.abs().amax(1).clamp_min(_SMALLEST) / _LARGEST
            values.append((wide / scale[:, None]).round().to(torch.int8))
            scales.append(scale)
        return cls(torch.cat(values), torch.cat(scales))

    @property
    def shape(self) -> tuple[int, int]:
        """``(outs, ins)``."""
        return self.values.shape[0], self.values.shape[1]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + bias``: ``[rows, ins]`` of a float type, dense, to ``[rows, outs]`` of it;
        ``bias`` is float32 ``[outs]``."""
        if triton.runs_on(x.device):
            from paceline.kernels.triton.products import multiply_weight_only

            return multiply_weight_only(x, self.values, self.scale, bias)
        wide = linear(x.float(), self.values.float()) * self.scale
        return (wide if bias is None else wide + bias).to(x.dtype)
