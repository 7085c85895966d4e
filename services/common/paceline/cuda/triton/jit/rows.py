"""Row-wise operations of a transformer, one kernel for each."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.triton.ahead import Kernel


@triton.jit
def _product(
    source, row, at, inside, rows, outs, bias,
    STRIDE: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A part of a row of a product in float32. If it is given before its scales, they are
    multiplied as :mod:`paceline.kernels.rotated` defines it, to a product of ``TYPE``. ``SCALED``:
    0: it is the product; 1: it is not; 2: it has a bias too."""
    value = tl.load(source + row.to(tl.int64) * STRIDE + at, mask=inside, other=0)
    if SCALED > 0:
        value = value.to(tl.float32) * tl.load(rows + row)
        value = value * tl.load(outs + at, mask=inside, other=0.0)
        if SCALED == 2:
            value += tl.load(bias + at, mask=inside, other=0.0)
        value = value.to(TYPE)
    return value.to(tl.float32)


@Kernel
@triton.jit
def add_norm_rows(
    x, delta, weight, out, eps, rows, outs, bias,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr,
    STRIDE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One row: ``x += delta``, then its root mean square norm into ``out``."""
    number = tl.program_id(0)
    row = number.to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if HAS_DELTA:
        value += _product(
            delta, number, at, inside, rows, outs, bias, STRIDE, SCALED, out.dtype.element_ty
        )
        tl.store(x + row + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) * (1.0 / WIDTH) + eps)
    value = value * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


@Kernel
@triton.jit
def gate_rows(
    gate_up, out, rows, outs, bias,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A part of one row: ``silu(gate) * up``."""
    number = tl.program_id(0)
    row = number.to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    kind: tl.constexpr = out.dtype.element_ty
    gate = _product(gate_up, number, at, inside, rows, outs, bias, STRIDE, SCALED, kind)
    up = _product(gate_up, number, WIDTH + at, inside, rows, outs, bias, STRIDE, SCALED, kind)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, gated.to(out.dtype.element_ty), mask=inside)


@Kernel
@triton.jit
def rotate_rows(
    heads, table, positions, q_norm, k_norm, q_out, keys, values, rows, blocks, tables, places,
    q_eps, k_eps, key_page, key_head, key_slot, value_page, value_head, value_slot, table_stride,
    row_scales, outs, bias,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HAS_NORM: tl.constexpr, STRIDE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One head of one row: norm, rotation, and for keys and values the way to their slot."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.load(rows + row * 3)
    if block >= 0:
        at = tl.arange(0, BLOCK)
        inside = at < HALF
        column = head * 2 * HALF + at
        kind: tl.constexpr = values.dtype.element_ty
        low = _product(heads, row, column, inside, row_scales, outs, bias, STRIDE, SCALED, kind)
        high = _product(
            heads, row, column + HALF, inside, row_scales, outs, bias, STRIDE, SCALED, kind
        )
        if head < Q_HEADS + KV_HEADS:
            if HAS_NORM:
                norm, eps = k_norm, k_eps
                if head < Q_HEADS:
                    norm, eps = q_norm, q_eps
                mean = (tl.sum(low * low, 0) + tl.sum(high * high, 0)) * (0.5 / HALF)
                scale = tl.rsqrt(mean + eps)
                low = low * scale * tl.load(norm + at, mask=inside, other=0.0)
                high = high * scale * tl.load(norm + HALF + at, mask=inside, other=0.0)
            angle = table + tl.load(positions + row) * 2 * HALF + at
            cos = tl.load(angle, mask=inside, other=0.0)
            sin = tl.load(angle + HALF, mask=inside, other=0.0)
            turned = low * cos - high * sin
            high = high * cos + low * sin
            low = turned
        if head < Q_HEADS:
            goal = q_out + (row.to(tl.int64) * Q_HEADS + head) * 2 * HALF + at
            tl.store(goal, low, mask=inside)
            tl.store(goal + HALF, high, mask=inside)
        else:
            slot = tl.load(blocks + block * 4 + 1) + tl.load(rows + row * 3 + 1)
            sequence = tl.load(blocks + block * 4 + 3)
            is_value = head >= Q_HEADS + KV_HEADS
            kv_head = (head - Q_HEADS) % KV_HEADS
            if PAGE == 0:
                place = places + (sequence * 2 + is_value.to(tl.int32)) * 3
                offset = tl.load(place) + tl.load(place + 1) * kv_head
                offset += slot.to(tl.int64) * tl.load(place + 2)
            else:
                page = tl.load(tables + sequence.to(tl.int64) * table_stride + slot // PAGE)
                pages = tl.where(is_value, value_page, key_page).to(tl.int64) * page
                slots = tl.where(is_value, value_slot, key_slot).to(tl.int64) * (slot % PAGE)
                offset = pages + slots + tl.where(is_value, value_head, key_head) * kv_head
            if is_value:
                tl.store(values + offset + at, low.to(values.dtype.element_ty), mask=inside)
                tl.store(values + offset + HALF + at, high.to(values.dtype.element_ty), mask=inside)
            else:
                tl.store(keys + offset + at, low.to(keys.dtype.element_ty), mask=inside)
                tl.store(keys + offset + HALF + at, high.to(keys.dtype.element_ty), mask=inside)
