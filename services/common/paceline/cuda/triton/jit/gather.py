"""Copy of rows that lie in pages: of a target's hidden states, and of its keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.cuda.triton.ahead import Kernel
from paceline.cuda.triton.jit.attention import NONE


@Kernel
@triton.jit
def gather_rows(
    source, places, out, WIDTH: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy row n, ``WIDTH`` elements from ``places[n]`` after the source on, to ``out[n]``; where
    that is ``NONE``, ``out[n]`` stays as it is. All places are multiples of ``ALIGN``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + row)
    if ALIGN > 1:  # or no wide loads could be made
        place = tl.multiple_of(place, ALIGN)
    inside = (at < WIDTH) & (place != NONE)
    tl.store(out + row * WIDTH + at, tl.load(source + place + at, mask=inside), mask=inside)


@Kernel
@triton.jit
def gather_pages(
    source, records, pages, out, slots, count,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the selected keys and values of each text to ``out [S, 2, HEADS, slots, DIM]``.

    ``records`` int64 ``[S, 5]``: place of the keys in page 0 after the source, distance between two
    pages, both in elements, positions in a page, number of selected positions, position of number
    ``SINKS``. ``pages`` int32 ``[S, count]``: the page of position 0, then those from the page of
    this position on.
    """
    text, plane = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    records += text * 5
    length = tl.load(records + 3)
    if tl.program_id(1) * BLOCK < length:
        size = tl.load(records + 2)
        first = tl.load(records + 4)
        sink = slot < SINKS
        position = tl.where(sink, slot, first + slot - SINKS)
        entry = tl.where(sink, 0, 1 + position // size - first // size)
        within = slot < length
        page = tl.load(pages + text * count + entry, mask=within, other=0).to(tl.int64)
        row = tl.load(records) + page * tl.load(records + 1)
        row += (plane * size + position % size) * DIM
        if ALIGN > 1:
            row = tl.multiple_of(row, ALIGN)
        at = tl.arange(0, WIDE)
        inside = within[:, None] & (at < DIM)[None, :]
        value = tl.load(source + row[:, None] + at[None, :], mask=inside)
        goal = ((text * 2 * HEADS + plane) * slots + slot) * DIM
        tl.store(out + goal[:, None] + at[None, :], value, mask=inside)
