"""Products on NVIDIA GPUs: of routed experts, of 8-bit weights with inputs in their own type, and
the steps around those of 8-bit integers."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from paceline.kernels.triton.jit.products import (
    add_splits,
    multiply_int8_weights,
    multiply_tiles,
    quantise_rotated_rows,
    scale_int_sums,
)

TILE_ROWS = 32
"""Rows of a tile. A constant: bits of a row do not depend on how many rows its expert has."""

_OUTS = 64

_PART = 64
"""Inputs that a warp rotates among themselves."""

_SCALED = 1024

_WEIGHT_TILES = ((16, 64, 4), (64, 128, 4), (128, 128, 8))
"""Rows and outputs of a tile of 8-bit weights, and its warps: the first with room for all rows. A
product of few rows waits for weights alone; one of many reads its inputs again for each tile."""

_DEFAULT_PROGRAMS = 132
"""Programs that a GPU runs side by side, where there is none to ask."""


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


def multiply_weight_only(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """See :meth:`paceline.kernels.weight_only.WeightOnlyMatrix.multiply`. Where there are fewer
    tiles than multiprocessors, each is computed in splits of the inputs, whose float32 sums a
    second kernel adds in order."""
    (rows, ins), outs = x.shape, len(values)
    block_r, block_o, warps = next(
        (tile for tile in _WEIGHT_TILES if rows <= tile[0]), _WEIGHT_TILES[-1]
    )
    block_k = 128 if block_r < 64 else 64
    tiles = triton.cdiv(rows, block_r), triton.cdiv(outs, block_o)
    splits = max(1, min(_programs(x.device) // (tiles[0] * tiles[1]), ins // (4 * block_k)))
    part = triton.cdiv(triton.cdiv(ins, splits), block_k) * block_k
    splits = triton.cdiv(ins, part)
    out = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    sums = out if splits == 1 else out.new_empty(splits, rows, outs, dtype=torch.float32)
    added = scale if bias is None else bias
    # Four stages of 32-bit inputs would not fit the shared memory of sm_86, sm_89 and sm_120.
    stages = 4 if x.element_size() == 2 else 2
    multiply_int8_weights[(*tiles, splits)](
        x, values, scale, added, sums, rows, outs, ins, part,
        BLOCK_R=block_r, BLOCK_O=block_o, BLOCK_K=block_k, SPLIT=splits > 1,
        HAS_BIAS=bias is not None, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        add_splits[(rows, triton.cdiv(outs, _SCALED))](
            sums, scale, added, out, splits, outs, rows * outs,
            BLOCK=_SCALED, HAS_BIAS=bias is not None,
        )  # fmt: skip
    return out


@cache
def _programs(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _DEFAULT_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
