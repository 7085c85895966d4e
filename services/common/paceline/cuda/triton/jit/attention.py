"""Hybrid tree attention (LongSpec, section 3.3) as two kernels.

The first attends a tile of rows to a chunk of keys; its programs take such work items by turns.
Tiles of keys that all rows see need no mask. The second merges the chunks of each row by their
log-sum-exp. A third records softmax weights, which need the log-sum-exp, and scores of more rows
than the first one does. Scores are in units of log 2.

Tables are fields of :class:`paceline.cuda.triton.tiles.Work`, which says why a row has the
same bits in every batch. Kernels are compiled without contraction of products and sums, or loops
with and without masks would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.triton.ahead import Kernel

LOG2E = 1.4426950408889634
NONE: tl.constexpr = tl.constexpr(-(1 << 62))  # in the place of a row that is not recorded

# Of a tile of keys, a row sees all, or those up to its position on its path, or those whose bits
# are set.
ALL, PATH, WORDS = (tl.constexpr(n) for n in range(3))

# Bits of a work item that are its chunk, the others are its tile; numbers of a row tile.
CHUNK_BITS, TILE_FIELDS = tl.constexpr(12), tl.constexpr(12)
_CHUNK_MASK = tl.constexpr(4095)


@triton.jit
def _chunk_begin(chunk):
    """See :func:`paceline.cuda.triton.tiles.chunk_begin`."""
    far = tl.where(chunk < 32, 4096 + (chunk - 16) * 512, 12288 + (chunk - 32) * 1024)
    return tl.where(chunk < 16, chunk * 256, far)


@triton.jit
def _key_offsets(
    n, slots, seen, sequence, head, kind, tables, origins, page_stride, head_stride, slot_stride,
    table_stride, PAGE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
    ANYWHERE: tl.constexpr,
):  # fmt: skip
    """Element offsets of the slots of one head that are ``seen``, int64 ``[BLOCK_N]``; unless they
    are ``ANYWHERE``, they are those from ``n`` on."""
    if PAGE == 0:  # contiguous: every sequence has its own origin and strides
        place = origins + (sequence * 2 + kind) * 3
        origin = tl.load(place) + tl.load(place + 1) * head
        stride = tl.load(place + 2)
        if ALIGN > 1:  # or no wide loads could be made
            origin = tl.multiple_of(origin, ALIGN)
            stride = tl.multiple_of(stride, ALIGN)
        offsets = origin + slots.to(tl.int64) * stride
    else:
        row = tables + sequence.to(tl.int64) * table_stride
        if PAGE % BLOCK_N == 0 and not ANYWHERE:  # a tile lies in one page
            page = tl.load(row + n // PAGE).to(tl.int64)
            offsets = page * page_stride + (slots - n // PAGE * PAGE).to(tl.int64) * slot_stride
        else:
            pages = tl.load(row + slots // PAGE, mask=seen, other=0).to(tl.int64)
            offsets = pages * page_stride + (slots % PAGE).to(tl.int64) * slot_stride
        offsets += head * head_stride
    return offsets


@triton.jit
def _record(
    scores, node, recorded, probe, probed, columns, end, head, layer,
):  # fmt: skip
    """Record the sum over a group of the scores of one row: fixed order, no atomics. A tile holds
    whole groups."""
    if recorded >= 0:
        is_recorded = node == recorded
        total = tl.sum(tl.where(is_recorded[:, None], scores, 0.0), 0) * 0.6931471805599453
        place = tl.load(probe + 1) + tl.load(probe + 2) * head + tl.load(probe + 3) * layer
        tl.store(probed + place + columns, total, mask=columns < end)


@triton.jit
def _recorded_here(probe, places, first, count):
    """The node of a probe if its place is among ``count`` from ``first`` on, else -1."""
    node = tl.load(probe).to(tl.int32)
    place = tl.load(places + node * 4 + 1, mask=node >= 0, other=-1)
    return tl.where((node >= 0) & (place >= first) & (place < first + count), node, -1)


@triton.jit
def _tile(
    q, top, total, out, n, end, start, node, position, recorded, second, depth, word_row, steps,
    listed, sequence, head, keys, values, masks, tables, origins, probes, probed, layer, scale,
    key_page, key_head, key_slot, value_page, value_head, value_slot, table_stride,
    DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, SEES: tl.constexpr, MASK_WORDS: tl.constexpr,
    MASK_ALIGN: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys, the columns from ``n`` on, into the running softmax ``(top, total,
    out)``. Columns before ``start`` are slots, those from there on as ``steps`` lists them."""
    cols = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, WIDE)
    columns = n + cols
    there = columns < end
    slots = columns
    if SEES == PATH:
        new = columns - start
        step = tl.load(steps + new, mask=(new >= 0) & there & listed, other=0).to(tl.int32)
        slots = tl.where((new >= 0) & listed, start + step, columns)
    inside = (dims < DIM)[None, :]
    if SEES != ALL:
        inside = inside & there[:, None]
    key_at = _key_offsets(
        n, slots, there, sequence, head, 0, tables, origins, key_page, key_head, key_slot,
        table_stride, PAGE, ALIGN, BLOCK_N, SEES == PATH,
    )  # fmt: skip
    if SEES != ALL or DIM != WIDE:
        key = tl.load(keys + key_at[:, None] + dims[None, :], mask=inside, other=0.0)
    else:
        key = tl.load(keys + key_at[:, None] + dims[None, :])
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    if SEES == PATH:
        seen = columns[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (columns[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    if SEES == WORDS:
        # Bits of a row from the tile's first slot on: one or two words of each row, not one a key.
        first = n - start // MASK_ALIGN * MASK_ALIGN
        word = masks + word_row * MASK_WORDS + (first >> 5)
        bits = tl.load(word)[:, None]
        if BLOCK_N == 64:
            bits = tl.where((cols < 32)[None, :], bits, tl.load(word + 1)[:, None])
        seen = (((bits >> ((first + cols) & 31)[None, :]) & 1) != 0) | (columns < start)[None, :]
        if WINDOW > 0:  # the position of a node is start + depth
            new = columns - start
            at = tl.load(depth + new * 3, mask=(new >= 0) & there, other=0)
            where = tl.where(new < 0, columns, start + at)
            seen = seen & (where[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    if PROBES >= 1:
        prefix = tl.minimum(start, end)
        _record(scores, node, recorded, probes, probed, columns, prefix, head, layer)
        if PROBES == 2:
            _record(scores, node, second, probes + 4, probed, columns, prefix, head, layer)
    highest = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(weights, 1)
    value_at = _key_offsets(
        n, slots, there, sequence, head, 1, tables, origins, value_page, value_head, value_slot,
        table_stride, PAGE, ALIGN, BLOCK_N, SEES == PATH,
    )  # fmt: skip
    if SEES != ALL or DIM != WIDE:
        value = tl.load(values + value_at[:, None] + dims[None, :], mask=inside, other=0.0)
    else:
        value = tl.load(values + value_at[:, None] + dims[None, :])
    out = out * shrink[:, None]
    out = tl.dot(weights.to(value.dtype), value, out, input_precision="ieee")
    return highest, total, out


@Kernel
@triton.jit(do_not_specialize=["scale", "layer", "kv_heads", "part_rows"])
def attend_items(
    q, keys, values, part, part_lse, spans, items, tiles, places, steps, blocks, rows, masks,
    tables, origins, probes, probed, layer, scale, kv_heads, part_rows,
    key_page, key_head, key_slot, value_page, value_head, value_slot, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, MASK_WORDS: tl.constexpr, MASK_ALIGN: tl.constexpr, PROBES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Work items of one launch: for each kv head a tile of rows against a chunk of keys.

    Writes fp32 ``part [Hkv, part_rows, DIM]`` and its log-sum-exp ``part_lse [Hkv, part_rows]``.
    With ``TREE``, masks have the paths, which only the device knows.
    """
    first_item = tl.load(spans)
    work_end = (tl.load(spans + 1) - first_item) * kv_heads
    # What does not change from item to item is computed anew, or it fills the registers.
    for work in tl.range(
        tl.program_id(0), work_end, tl.num_programs(0), num_stages=1, disable_licm=True
    ):
        head = work % kv_heads
        item = tl.load(items + first_item + work // kv_heads)
        tile = tiles + (item >> CHUNK_BITS) * TILE_FIELDS
        chunk = item & _CHUNK_MASK
        begin = _chunk_begin(chunk)
        end = tl.minimum(_chunk_begin(chunk + 1), tl.load(tile + 9))
        block = tl.load(tile)
        head_row = tl.load(tile + 1)
        count = tl.load(tile + 2)
        first_row = tl.load(blocks + block * 4)
        start = tl.load(blocks + block * 4 + 1)
        sequence = tl.load(blocks + block * 4 + 3)
        block_places = places + first_row * 4
        lanes = tl.arange(0, BLOCK_M)
        live = lanes < count
        packed = head_row + lanes
        node = tl.load(block_places + packed // GROUP * 4, mask=live, other=-1)
        row = first_row + tl.where(live, node, 0)
        position = start + tl.load(rows + row * 3 + 2)
        dims = tl.arange(0, WIDE)
        query = (row * kv_heads + head).to(tl.int64) * GROUP + packed % GROUP
        q_tile = tl.load(
            q + query[:, None] * DIM + dims[None, :],
            mask=live[:, None] & (dims < DIM)[None, :],
            other=0.0,
        ).to(keys.dtype.element_ty)
        depth = rows + first_row * 3 + 2
        probe = probes + block * 8
        recorded = -1
        second = -1
        if PROBES >= 1:
            recorded = _recorded_here(probe, block_places, head_row // GROUP, count // GROUP)
            if PROBES == 2:
                second = _recorded_here(probe + 4, block_places, head_row // GROUP, count // GROUP)
        list_begin = tl.load(tile + 10)
        listed = list_begin >= 0
        path = steps + tl.maximum(list_begin, 0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, WIDE], tl.float32)
        # All rows see the tiles up to ``whole``, which are in their own slots.
        whole = tl.maximum(tl.minimum(end, tl.load(tile + 8)), begin)
        first = begin
        if WINDOW > 0:
            begin = tl.minimum(tl.maximum(tl.load(tile + 6), begin), whole)
            first = tl.minimum(tl.maximum(tl.load(tile + 7), begin), whole)
            for n in tl.range(begin, first, BLOCK_N, num_stages=1, disable_licm=True):
                top, total, out = _tile(
                    q_tile, top, total, out, n, end, start, node, position, recorded, second,
                    depth, row, path, False, sequence, head, keys, values, masks, tables, origins,
                    probe, probed, layer, scale, key_page, key_head, key_slot, value_page,
                    value_head, value_slot, table_stride, DIM, WIDE, BLOCK_N, PAGE, ALIGN, WINDOW,
                    PATH, MASK_WORDS, MASK_ALIGN, PROBES,
                )  # fmt: skip
        for n in tl.range(first, whole, BLOCK_N, num_stages=STAGES):
            top, total, out = _tile(
                q_tile, top, total, out, n, end, start, node, position, recorded, second,
                depth, row, path, False, sequence, head, keys, values, masks, tables, origins,
                probe, probed, layer, scale, key_page, key_head, key_slot, value_page,
                value_head, value_slot, table_stride, DIM, WIDE, BLOCK_N, PAGE, ALIGN, WINDOW,
                ALL, MASK_WORDS, MASK_ALIGN, PROBES,
            )  # fmt: skip
        for n in tl.range(whole, end, BLOCK_N, num_stages=1, disable_licm=True):
            top, total, out = _tile(
                q_tile, top, total, out, n, end, start, node, position, recorded, second,
                depth, row, path, listed, sequence, head, keys, values, masks, tables, origins,
                probe, probed, layer, scale, key_page, key_head, key_slot, value_page,
                value_head, value_slot, table_stride, DIM, WIDE, BLOCK_N, PAGE, ALIGN, WINDOW,
                WORDS if TREE else PATH, MASK_WORDS, MASK_ALIGN, PROBES,
            )  # fmt: skip
        empty = total == 0.0
        out = out / tl.where(empty, 1.0, total)[:, None]
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        at = tl.load(tile + 3) + (chunk - tl.load(tile + 4)) * count + lanes
        at = head.to(tl.int64) * part_rows + at
        tl.store(part_lse + at, lse, mask=live)
        tl.store(
            part + at[:, None] * DIM + dims[None, :],
            out,
            mask=live[:, None] & (dims < DIM)[None, :],
        )


@Kernel
@triton.jit(do_not_specialize=["scale", "layer", "kv_heads"])
def record_items(
    q, keys, lse, spans, items, tiles, places, blocks, rows, tables, origins, wanted, noted,
    probed, layer, scale, kv_heads, key_page, key_head, key_slot, table_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Work items of one launch: what the nodes of a tile give to the prefix's part of its keys.

    A tile has ``NODES`` nodes with ``HEADS`` heads each, powers of two, of which some are unused;
    ``wanted`` and ``noted`` as in :class:`paceline.cuda.triton.probes.ProbeTable`.
    """
    first_item = tl.load(spans)
    work_end = (tl.load(spans + 1) - first_item) * kv_heads
    for work in tl.range(tl.program_id(0), work_end, tl.num_programs(0), num_stages=1):
        head = work % kv_heads
        item = tl.load(items + first_item + work // kv_heads)
        tile = tiles + (item >> CHUNK_BITS) * TILE_FIELDS
        chunk = item & _CHUNK_MASK
        block = tl.load(tile)
        first_row = tl.load(blocks + block * 4)
        start = tl.load(blocks + block * 4 + 1)
        sequence = tl.load(blocks + block * 4 + 3)
        begin = _chunk_begin(chunk)
        end = tl.minimum(_chunk_begin(chunk + 1), tl.minimum(tl.load(tile + 9), start))
        kind = wanted + block * 4
        if tl.load(kind) == 0:
            end = begin
        lead = tl.load(tile + 1) // GROUP
        count = tl.load(tile + 2) // GROUP
        tile_places = places + (first_row + lead) * 4
        lanes = tl.arange(0, NODES * HEADS)
        live = (lanes % HEADS < GROUP) & (lanes // HEADS < count)
        row = first_row + tl.load(tile_places + lanes // HEADS * 4, mask=live, other=0)
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
        node = tl.load(tile_places + nodes * 4, mask=nodes < count, other=0)
        place = tl.load(noted + first_row + node, mask=nodes < count, other=NONE)
        ours = (nodes < count) & (place != NONE)
        place += tl.load(kind + 1) * head + tl.load(kind + 2) * layer
        weights = tl.load(kind + 3) > 0
        cols = tl.arange(0, BLOCK_N)
        for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            slots = n + cols
            key_at = _key_offsets(
                n, slots, slots < end, sequence, head, 0, tables, origins, key_page, key_head,
                key_slot, table_stride, PAGE, ALIGN, BLOCK_N, False,
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
            value = tl.where(weights, tl.exp2(scores - total[:, None]), scores * 0.6931471805599453)
            value = tl.where(live[:, None], value, 0.0)
            sums = tl.sum(tl.reshape(value, [NODES, HEADS, BLOCK_N]), 1)
            tl.store(
                probed + place[:, None] + slots[None, :],
                sums,
                mask=ours[:, None] & (slots < end)[None, :],
            )


@Kernel
@triton.jit(do_not_specialize=["part_rows"])
def merge_items(
    part, part_lse, out, lse, spans, tiles, places, rows, sinks, part_rows,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, USED: tl.constexpr,
    CHUNKS: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One packed row and query head: all chunks of it, merged by log-sum-exp in their order, and
    the sink of the head. Rows whose tiles are of another launch are left as they are.

    Chunks are taken in groups of ``CHUNKS`` that begin at multiples of it, whichever chunk is a
    row's first one; those that it does not have add nothing.
    """
    row = tl.program_id(0)
    q_head = tl.program_id(1)
    block = tl.load(rows + row * 3)
    at = (row * tl.num_programs(1) + q_head).to(tl.int64)
    dims = tl.arange(0, WIDE)
    mixed = tl.zeros([WIDE], tl.float32)  # what rows of padding get
    here = block < 0
    if block >= 0:
        packed = tl.load(places + row * 4 + 1) * GROUP + q_head % GROUP
        near = tl.load(places + row * 4 + 2) + packed // USED
        tail = tl.load(places + row * 4 + 3)
        tail += (packed - tl.load(tiles + tail * TILE_FIELDS + 1)) // USED
        here = (tail >= tl.load(spans + 2)) & (tail < tl.load(spans + 3))
        near = tiles + near * TILE_FIELDS
        tail = tiles + tail * TILE_FIELDS
        begin = tl.load(near + 4)
        border = tl.load(tail + 4)
        end = tl.where(here, border + tl.load(tail + 5), 0)
        near_rows = tl.load(near + 2)
        tail_rows = tl.load(tail + 2)
        near_at = tl.load(near + 3) + packed - tl.load(near + 1) - begin * near_rows
        tail_at = tl.load(tail + 3) + packed - tl.load(tail + 1) - border * tail_rows
        base = (q_head // GROUP).to(tl.int64) * part_rows
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        for group in range(begin // CHUNKS * CHUNKS, end, CHUNKS):
            chunk = group + tl.arange(0, CHUNKS)
            there = (chunk >= begin) & (chunk < end)
            item = tl.where(
                chunk < border, near_at + chunk * near_rows, tail_at + chunk * tail_rows
            )
            item = base + item
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
            mask = (lanes == 0) & here
            tl.store(lse + at + lanes, tl.where(empty, float("-inf"), value), mask=mask)
    tl.store(out + at * DIM + dims, mixed.to(out.dtype.element_ty), mask=(dims < DIM) & here)
