"""Hybrid tree attention (LongSpec, section 3.3) as two kernels.

The first attends a tile of packed rows to a chunk of keys. Whole tiles of the committed prefix need
no mask; only the tiles in which the block of new nodes or a window begins are masked. The second
merges the chunks of each row by their log-sum-exp. A third records softmax weights, which need the
log-sum-exp, and scores of more rows than the first one does. Scores are in units of log 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
NONE: tl.constexpr = tl.constexpr(-(1 << 62))
"""In the place of a row that is not recorded."""


@triton.jit
def _key_offsets(
    n, cols, stop, sequence, head, kind, tables, places, page_stride, head_stride, slot_stride,
    table_stride, PAGE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Element offsets of slots ``n + cols`` of one head, int64 ``[BLOCK_N]``."""
    if PAGE == 0:  # contiguous: every sequence has its own origin and strides
        place = places + (sequence * 2 + kind) * 3
        origin = tl.load(place) + tl.load(place + 1) * head
        stride = tl.load(place + 2)
        if ALIGN > 1:  # or no wide loads could be made
            origin = tl.multiple_of(origin, ALIGN)
            stride = tl.multiple_of(stride, ALIGN)
        offsets = origin + (n + cols).to(tl.int64) * stride
    else:
        row = tables + sequence.to(tl.int64) * table_stride
        if PAGE % BLOCK_N == 0:  # a tile lies in one page
            page = tl.load(row + n // PAGE).to(tl.int64)
            offsets = page * page_stride + (n % PAGE + cols).to(tl.int64) * slot_stride
        else:
            slots = n + cols
            pages = tl.load(row + slots // PAGE, mask=slots < stop, other=0).to(tl.int64)
            offsets = pages * page_stride + (slots % PAGE).to(tl.int64) * slot_stride
        offsets += head * head_stride
    return offsets


@triton.jit
def _record(
    scores, node, lead, probe, probed, slots, end, head, layer,
    GROUP: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Record the sum over a group of the scores of one row: fixed order, no atomics."""
    recorded = tl.load(probe).to(tl.int32)
    if (recorded >= lead) & (recorded < lead + USED // GROUP):  # a tile holds whole groups
        mine = node == recorded
        total = tl.sum(tl.where(mine[:, None], scores, 0.0), 0) * 0.6931471805599453
        place = tl.load(probe + 1) + tl.load(probe + 2) * head + tl.load(probe + 3) * layer
        tl.store(probed + place + slots, total, mask=slots < end)


@triton.jit
def _tile(
    q, top, total, out, n, end, start, node, lead, depth, mask_row, sequence, head,
    keys, values, masks, tables, places, probes, probed, layer, scale,
    key_page, key_head, key_slot, value_page, value_head, value_slot, table_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr,
    MASK_ALIGN: tl.constexpr, PROBES: tl.constexpr, GROUP: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax ``(top, total, out)``."""
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, WIDE)
    slots = n + cols
    inside = (dims < DIM)[None, :]
    if MASKED:
        inside = inside & (slots < end)[:, None]
    key_at = _key_offsets(
        n, cols, end, sequence, head, 0, tables, places, key_page, key_head, key_slot,
        table_stride, PAGE, ALIGN, BLOCK_N,
    )  # fmt: skip
    if MASKED or DIM != WIDE:
        key = tl.load(keys + key_at[:, None] + dims[None, :], mask=inside, other=0.0)
    else:
        key = tl.load(keys + key_at[:, None] + dims[None, :])
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        # Bits of a row from the tile's first slot on: one or two words of each row, not one a key.
        first = n - start // MASK_ALIGN * MASK_ALIGN  # below 0: all ones, as for the prefix
        word = masks + mask_row * WORDS + (first >> 5)
        bits = tl.load(word, mask=first >= 0, other=-1)[:, None]
        if BLOCK_N == 64:
            high = tl.load(word + 1, mask=first >= 0, other=-1)[:, None]
            bits = tl.where((cols < 32)[None, :], bits, high)
        seen = ((bits >> ((first + cols) & 31)[None, :]) & 1) != 0
        if WINDOW > 0:  # the position of a node is start + depth
            new = slots - start
            at = tl.load(depth + new * 3, mask=(new >= 0) & (slots < end), other=0)
            position = tl.where(new < 0, slots, start + at)
            mine = start + tl.load(depth + node * 3, mask=node >= 0, other=0)
            seen = seen & (position[None, :] > mine[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    if PROBES >= 1:
        prefix = tl.minimum(start, end)
        _record(scores, node, lead, probes, probed, slots, prefix, head, layer, GROUP, USED)
        if PROBES == 2:
            _record(scores, node, lead, probes + 4, probed, slots, prefix, head, layer, GROUP, USED)
    highest = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(weights, 1)
    value_at = _key_offsets(
        n, cols, end, sequence, head, 1, tables, places, value_page, value_head, value_slot,
        table_stride, PAGE, ALIGN, BLOCK_N,
    )  # fmt: skip
    if MASKED or DIM != WIDE:
        value = tl.load(values + value_at[:, None] + dims[None, :], mask=inside, other=0.0)
    else:
        value = tl.load(values + value_at[:, None] + dims[None, :])
    out = out * shrink[:, None]
    out = tl.dot(weights.to(value.dtype), value, out, input_precision="ieee")
    return highest, total, out


@triton.jit(do_not_specialize=["scale", "layer"])
def attend_items(
    q, keys, values, part, part_lse, items, blocks, rows, masks, tables, places, probes, probed,
    layer, scale, key_page, key_head, key_slot, value_page, value_head, value_slot, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    USED: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, WORDS: tl.constexpr, MASK_ALIGN: tl.constexpr, PROBES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One work item and kv head: a tile of rows against a chunk of keys.

    Writes fp32 ``part [W, Hkv, BLOCK_M, DIM]`` and its log-sum-exp ``part_lse [W, Hkv, BLOCK_M]``.
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    begin = tl.load(items + item * 4 + 2)
    end = tl.load(items + item * 4 + 3)
    if begin < end:
        block = tl.load(items + item * 4)
        first_row = tl.load(blocks + block * 4)
        start = tl.load(blocks + block * 4 + 1)
        length = tl.load(blocks + block * 4 + 2)
        sequence = tl.load(blocks + block * 4 + 3)
        lanes = tl.arange(0, BLOCK_M)
        head_row = tl.load(items + item * 4 + 1)
        packed = head_row + lanes
        live = (lanes < USED) & (packed < length * GROUP)
        node = tl.where(live, packed // GROUP, -1)
        row = first_row + tl.where(live, node, 0)
        lead = head_row // GROUP
        dims = tl.arange(0, WIDE)
        query = (row * kv_heads + head).to(tl.int64) * GROUP + packed % GROUP
        q_tile = tl.load(
            q + query[:, None] * DIM + dims[None, :],
            mask=live[:, None] & (dims < DIM)[None, :],
            other=0.0,
        ).to(keys.dtype.element_ty)
        depth = rows + first_row * 3 + 2
        probe = probes + block * 8
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, WIDE], tl.float32)
        # Tiles from ``first`` to ``whole`` are seen by all rows, also by the one farthest on.
        whole = tl.maximum(tl.minimum(end, start) // BLOCK_N * BLOCK_N, begin)
        first = begin
        if WINDOW > 0:
            oldest = tl.maximum(start + length - WINDOW, 0)
            oldest = (oldest + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            first = tl.minimum(tl.maximum(oldest, begin), whole)
            for n in tl.range(begin, first, BLOCK_N, num_stages=1):
                top, total, out = _tile(
                    q_tile, top, total, out, n, end, start, node, lead, depth, row, sequence, head,
                    keys, values, masks, tables, places, probe, probed, layer, scale,
                    key_page, key_head, key_slot, value_page, value_head, value_slot,
                    table_stride, DIM, WIDE, BLOCK_N, PAGE, ALIGN, WINDOW, True, WORDS,
                    MASK_ALIGN, PROBES, GROUP, USED,
                )  # fmt: skip
        for n in tl.range(first, whole, BLOCK_N, num_stages=STAGES):
            top, total, out = _tile(
                q_tile, top, total, out, n, end, start, node, lead, depth, row, sequence, head,
                keys, values, masks, tables, places, probe, probed, layer, scale,
                key_page, key_head, key_slot, value_page, value_head, value_slot,
                table_stride, DIM, WIDE, BLOCK_N, PAGE, ALIGN, WINDOW, False, WORDS,
                MASK_ALIGN, PROBES, GROUP, USED,
            )  # fmt: skip
        for n in tl.range(whole, end, BLOCK_N, num_stages=1):
            top, total, out = _tile(
                q_tile, top, total, out, n, end, start, node, lead, depth, row, sequence, head,
                keys, values, masks, tables, places, probe, probed, layer, scale,
                key_page, key_head, key_slot, value_page, value_head, value_slot,
                table_stride, DIM, WIDE, BLOCK_N, PAGE, ALIGN, WINDOW, True, WORDS,
                MASK_ALIGN, PROBES, GROUP, USED,
            )  # fmt: skip
        empty = total == 0.0
        out = out / tl.where(empty, 1.0, total)[:, None]
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        at = (item * kv_heads + head).to(tl.int64) * BLOCK_M + lanes
        tl.store(part_lse + at, lse, mask=live)
        tl.store(
            part + at[:, None] * DIM + dims[None, :],
            out,
            mask=live[:, None] & (dims < DIM)[None, :],
        )


@triton.jit(do_not_specialize=["scale", "layer"])
def record_items(
    q, keys, lse, items, blocks, rows, tables, places, wanted, noted, probed, layer, scale,
    key_page, key_head, key_slot, table_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, USED: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One work item and kv head: what the nodes of a tile give to the prefix's part of its keys.

    A tile has ``NODES`` nodes with ``HEADS`` heads each, powers of two, of which some are unused;
    ``wanted`` and ``noted`` as in :class:`paceline.kernels._triton.plan.ProbeTable`.
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    begin = tl.load(items + item * 4 + 2)
    block = tl.load(items + item * 4)
    start = tl.load(blocks + block * 4 + 1)
    end = tl.minimum(tl.load(items + item * 4 + 3), start)
    wanted += block * 4
    if (begin < end) & (tl.load(wanted) > 0):
        first_row = tl.load(blocks + block * 4)
        length = tl.load(blocks + block * 4 + 2)
        sequence = tl.load(blocks + block * 4 + 3)
        lead = tl.load(items + item * 4 + 1) // GROUP
        lanes = tl.arange(0, NODES * HEADS)
        node = lead + lanes // HEADS
        live = (lanes % HEADS < GROUP) & (lanes // HEADS < USED // GROUP) & (node < length)
        row = first_row + tl.where(live, node, 0)
        dims = tl.arange(0, WIDE)
        query = (row * kv_heads + head).to(tl.int64) * GROUP + lanes % HEADS
        q_tile = tl.load(
            q + query[:, None] * DIM + dims[None, :],
            mask=live[:, None] & (dims < DIM)[None, :],
            other=0.0,
        ).to(keys.dtype.element_ty)
        total = tl.load(lse + query, mask=live, other=0.0) * 1.4426950408889634
        position = start + tl.load(rows + row * 3 + 2)
        nodes = tl.arange(0, NODES)
        mine = (nodes < USED // GROUP) & (lead + nodes < length)
        place = tl.load(noted + first_row + lead + nodes, mask=mine, other=NONE)
        mine = mine & (place != NONE)
        place += tl.load(wanted + 1) * head + tl.load(wanted + 2) * layer
        weights = tl.load(wanted + 3) > 0
        cols = tl.arange(0, BLOCK_N)
        for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            slots = n + cols
            key_at = _key_offsets(
                n, cols, end, sequence, head, 0, tables, places, key_page, key_head, key_slot,
                table_stride, PAGE, ALIGN, BLOCK_N,
            )  # fmt: skip
            key = tl.load(
                keys + key_at[:, None] + dims[None, :],
                mask=(slots < end)[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            scores = tl.dot(q_tile, tl.trans(key), input_precision="ieee") * scale
            if WINDOW > 0:
                seen = slots[None, :] > position[:, None] - WINDOW
                scores = tl.where(seen, scores, float("-inf"))
            found = tl.where(weights, tl.exp2(scores - total[:, None]), scores * 0.6931471805599453)
            found = tl.where(live[:, None], found, 0.0)
            sums = tl.sum(tl.reshape(found, [NODES, HEADS, BLOCK_N]), 1)
            tl.store(
                probed + place[:, None] + slots[None, :],
                sums,
                mask=mine[:, None] & (slots < end)[None, :],
            )


@triton.jit
def merge_items(
    part, part_lse, out, lse, rows, tiles, bases, sinks,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    USED: tl.constexpr, CHUNKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One packed row and query head: all chunks of it, merged by log-sum-exp in their order, and
    the sink of the head."""
    row = tl.program_id(0)
    q_head = tl.program_id(1)
    block = tl.load(rows + row * 3)
    at = (row * tl.num_programs(1) + q_head).to(tl.int64)
    dims = tl.arange(0, WIDE)
    mixed = tl.zeros([WIDE], tl.float32)  # what rows of padding get
    if block >= 0:
        kv_heads = tl.num_programs(1) // GROUP
        packed = tl.load(rows + row * 3 + 1) * GROUP + q_head % GROUP
        tile = tl.load(bases + block) + packed // USED
        first = tl.load(tiles + tile * 2)
        count = tl.load(tiles + tile * 2 + 1)
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        for begin in range(0, count, CHUNKS):
            chunk = begin + tl.arange(0, CHUNKS)
            there = chunk < count
            item = ((first + chunk) * kv_heads + q_head // GROUP).to(tl.int64) * BLOCK_M
            item += packed % USED
            sums = tl.load(part_lse + item, mask=there, other=float("-inf"))
            highest = tl.maximum(top, tl.max(sums, 0))
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(sums - finite)
            shrink = tl.exp2(top - finite)
            attended = tl.load(
                part + item[:, None] * DIM + dims[None, :],
                mask=there[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
            mixed = mixed * shrink + tl.sum(attended * weights[:, None], 0)
            total = total * shrink + tl.sum(weights, 0)
            top = highest
        if HAS_SINKS:
            # More than 2^127 times the other weights is infinite: nothing is left of them.
            total += tl.exp2(tl.load(sinks + q_head) * 1.4426950408889634 - top)
        empty = total == 0.0
        mixed = mixed / tl.where(empty, 1.0, total)
        if HAS_LSE:
            value = (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
            lanes = tl.arange(0, 1)
            tl.store(lse + at + lanes, tl.where(empty, float("-inf"), value))
    tl.store(out + at * DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)
