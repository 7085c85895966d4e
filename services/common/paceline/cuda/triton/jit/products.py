"""Products of routed experts, and the steps around products of integers."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.triton.ahead import Kernel


@Kernel
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


@triton.jit
def _turned(x, at, inside, column, BLOCKS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Loaded inputs ``[BLOCKS, SIZE]`` after the stages of a transform within ``SIZE``."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    for stage in tl.static_range(STAGES):
        other = tl.gather(value, tl.broadcast_to(column ^ (1 << stage), (BLOCKS, SIZE)), 1)
        value = tl.where((column & (1 << stage)) == 0, value + other, other - value)
    return value


@triton.jit
def _largest(value):
    """The largest magnitude; infinity if there is a NaN."""
    magnitude = tl.where(value == value, tl.abs(value), float("inf"))
    return tl.max(tl.max(magnitude, 1), 0)


@triton.jit
def _store_rounded(values, at, inside, value, inverse, finite):
    """Scaled and rounded to the nearest integer, ties to even."""
    rounded = (value * inverse + 12582912.0) - 12582912.0  # 1.5 * 2^23
    tl.store(values + at, tl.where(finite, rounded, 0.0).to(tl.int8), mask=inside)


@Kernel
@triton.jit
def quantise_rotated_rows(
    x, values, scales,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """One row in 8 bits, see :mod:`paceline.kernels.rotated`.

    A block that is rotated together has ``PARTS`` parts, 1, 2, 4 or 8, of ``SIZE`` inputs, up to
    64: stages within a part exchange numbers of a warp, those between parts whole tensors.
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, SIZE)[None, :]
    at = tl.arange(0, BLOCKS)[:, None] * (SIZE * PARTS) + column
    inside = at < WIDTH  # blocks are whole
    at += row
    a = _turned(x, at, inside, column, BLOCKS, SIZE, STAGES)
    if PARTS >= 2:
        b = _turned(x, at + SIZE, inside, column, BLOCKS, SIZE, STAGES)
        a, b = a + b, a - b
    if PARTS >= 4:
        c = _turned(x, at + 2 * SIZE, inside, column, BLOCKS, SIZE, STAGES)
        d = _turned(x, at + 3 * SIZE, inside, column, BLOCKS, SIZE, STAGES)
        c, d = c + d, c - d
        a, c = a + c, a - c
        b, d = b + d, b - d
    if PARTS == 8:
        e = _turned(x, at + 4 * SIZE, inside, column, BLOCKS, SIZE, STAGES)
        f = _turned(x, at + 5 * SIZE, inside, column, BLOCKS, SIZE, STAGES)
        g = _turned(x, at + 6 * SIZE, inside, column, BLOCKS, SIZE, STAGES)
        h = _turned(x, at + 7 * SIZE, inside, column, BLOCKS, SIZE, STAGES)
        e, f = e + f, e - f
        g, h = g + h, g - h
        e, g = e + g, e - g
        f, h = f + h, f - h
        a, e = a + e, a - e
        b, f = b + f, b - f
        c, g = c + g, c - g
        d, h = d + h, d - h
    largest = _largest(a)
    if PARTS >= 2:
        largest = tl.maximum(largest, _largest(b))
    if PARTS >= 4:
        largest = tl.maximum(largest, tl.maximum(_largest(c), _largest(d)))
    if PARTS == 8:
        largest = tl.maximum(largest, tl.maximum(_largest(e), _largest(f)))
        largest = tl.maximum(largest, tl.maximum(_largest(g), _largest(h)))
    finite = largest < float("inf")
    largest = tl.maximum(largest, SMALLEST)
    scale = tl.div_rn(largest, LARGEST)
    tl.store(scales + tl.program_id(0), tl.where(finite, scale, float("nan")))
    inverse = tl.div_rn(LARGEST, largest)
    _store_rounded(values, at, inside, a, inverse, finite)
    if PARTS >= 2:
        _store_rounded(values, at + SIZE, inside, b, inverse, finite)
    if PARTS >= 4:
        _store_rounded(values, at + 2 * SIZE, inside, c, inverse, finite)
        _store_rounded(values, at + 3 * SIZE, inside, d, inverse, finite)
    if PARTS == 8:
        _store_rounded(values, at + 4 * SIZE, inside, e, inverse, finite)
        _store_rounded(values, at + 5 * SIZE, inside, f, inverse, finite)
        _store_rounded(values, at + 6 * SIZE, inside, g, inverse, finite)
        _store_rounded(values, at + 7 * SIZE, inside, h, inverse, finite)


@Kernel
@triton.jit
def scale_int_sums(
    sums, rows, outs, bias, out, stride,
    OUTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scale a part of a row of integer sums by the row's factor and the outputs'."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < OUTS
    value = tl.load(sums + row.to(tl.int64) * stride + at, mask=inside, other=0).to(tl.float32)
    value = value * tl.load(rows + row)
    value = value * tl.load(outs + at, mask=inside, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + at, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * OUTS + at, value.to(out.dtype.element_ty), mask=inside)
