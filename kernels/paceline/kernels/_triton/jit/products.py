"""Products whose order of additions is fixed by their matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_tiles(
    x, weights, bias, out, ends,
    EXPERTS: tl.constexpr, WIDE: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile of rows that have one expert, by its matrix of ``[EXPERTS, OUTS, INS]``.

    Rows are sorted by expert, and ``ends`` has the row behind the last of each. Tiles are counted
    through all experts; a program whose tile is beyond the last has nothing to do.
    """
    tile = tl.program_id(0)
    numbers = tl.arange(0, WIDE)
    stops = tl.load(ends + numbers, mask=numbers < EXPERTS, other=0)
    begins = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < EXPERTS), other=0)
    tiles = tl.where(numbers < EXPERTS, (stops - begins + BLOCK_R - 1) // BLOCK_R, 0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.sum(tl.where(numbers < expert, tiles, 0), 0)
        stop = tl.sum(tl.where(numbers == expert, stops, 0), 0)
        first = tl.sum(tl.where(numbers == expert, begins, 0), 0) + (tile - before) * BLOCK_R
        rows = first + tl.arange(0, BLOCK_R)
        outs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        ins = tl.arange(0, BLOCK_K)
        matrix = weights + expert.to(tl.int64) * OUTS * INS
        left = matrix + outs[:, None].to(tl.int64) * INS + ins[None, :]
        right = x + rows[None, :].to(tl.int64) * INS + ins[:, None]
        total = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
        # Weights on the wide side: an instruction of the tensor cores takes 64 of them.
        for at in tl.range(0, INS, BLOCK_K, num_stages=STAGES):
            inside = ins < INS - at
            a = tl.load(left + at, mask=(outs[:, None] < OUTS) & inside[None, :], other=0.0)
            b = tl.load(right + at, mask=(rows[None, :] < stop) & inside[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        if HAS_BIAS:
            added = tl.load(bias + expert * OUTS + outs, mask=outs < OUTS, other=0.0)
            total += added[:, None].to(tl.float32)
        goal = out + rows[None, :].to(tl.int64) * OUTS + outs[:, None]
        inside = (rows[None, :] < stop) & (outs[:, None] < OUTS)
        tl.store(goal, total.to(out.dtype.element_ty), mask=inside)
