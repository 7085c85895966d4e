"""Products of routed experts on NVIDIA GPUs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.kernels._triton.jit.products import multiply_tiles

TILE_ROWS = 32
"""Rows of a tile. A constant: bits of a row do not depend on how many rows its expert has."""

_OUTS = 64


def multiply_by_experts(x: Tensor, weights: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """A product of each row by its expert's matrix. The device is not waited for, and shapes depend
    on the number of rows alone, so that CUDA graphs can have it.

    Args:
        x: ``[rows, ins]``, dense.
        weights: ``[experts, outs, ins]`` of the same type, dense.
        bias: ``[experts, outs]``, dense, or None.
        chosen: Expert of each row, int64 ``[rows]``, rising.

    Returns:
        ``[rows, outs]``; the bits of a row depend on the row and its expert alone.
    """
    experts, outs, ins = weights.shape
    rows = len(x)
    out = x.new_empty(rows, outs)
    numbers = torch.arange(experts, device=x.device)
    ends = torch.searchsorted(chosen, numbers, right=True).int()
    # Of each expert whole tiles and one that is not; none has more tiles than rows.
    tiles = min(rows, experts + rows // TILE_ROWS)
    multiply_tiles[(tiles, triton.cdiv(outs, _OUTS))](
        x, weights, out if bias is None else bias, out, ends,
        EXPERTS=experts, WIDE=triton.next_power_of_2(experts), OUTS=outs, INS=ins,
        BLOCK_R=TILE_ROWS, BLOCK_O=_OUTS, BLOCK_K=64 if x.element_size() == 2 else 32,
        HAS_BIAS=bias is not None, STAGES=3, num_warps=4,
    )  # fmt: skip
    return out
