"""Products of routed experts on NVIDIA GPUs, and the steps around products of 8-bit integers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.cuda.triton.jit.products import multiply_tiles, quantise_rotated_rows, scale_int_sums

# Rows of a tile. A constant: bits of a row do not depend on how many rows its expert has.
TILE_ROWS = 32
_OUTS = 64
_PART = 64  # inputs that a warp rotates among themselves
_SCALED = 1024


def multiply_by_experts(x: Tensor, weights: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """Return a product of each row, ``[rows, ins]``, dense, by the matrix of its expert among
    ``[experts, outs, ins]`` of the same type, with a bias ``[experts, outs]`` or None; ``chosen``
    has the expert of each row, int64 ``[rows]``, rising.

    Returns ``[rows, outs]``; the bits of a row depend on the row and its expert alone. The device
    is not waited for, and shapes depend on the number of rows alone, so that CUDA graphs can have
    it.
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


def quantise_rotated(
    x: Tensor, size: int, largest: float = 127.0, smallest: float = 2.0**-100
) -> tuple[Tensor, Tensor]:
    """See :func:`paceline.kernels.rotated.quantise_rows`; the largest value of a row, or
    ``smallest``, becomes ``largest``."""
    rows, width = x.shape
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    part = min(size, _PART)
    blocks = triton.next_power_of_2(width // size)
    quantise_rotated_rows[(rows,)](
        x, values, scales, WIDTH=width, BLOCKS=blocks, SIZE=part, STAGES=part.bit_length() - 1,
        PARTS=size // part, LARGEST=largest, SMALLEST=smallest,
        num_warps=min(16, max(1, blocks * size // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return values, scales


def scaled_sums(
    sums: Tensor, rows: Tensor, outs: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See :func:`paceline.kernels.rotated.scale_sums`."""
    out = torch.empty(len(rows), len(outs), dtype=dtype, device=sums.device)
    scale_int_sums[(len(rows), triton.cdiv(len(outs), _SCALED))](
        sums, rows, outs, outs if bias is None else bias, out, sums.stride(0),
        OUTS=len(outs), BLOCK=_SCALED, HAS_BIAS=bias is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return out
