"""Launches of the kernels that gather rows from pages, by tables on the device.

Places are relative to a tensor on the device of the launch, in elements: what they lead to may lie
in other memory that this device can read. Where a row's width is a multiple of 16, places are too.
"""

from __future__ import annotations

import triton
from torch import Tensor

from paceline.cuda.triton.jit.attention import NONE
from paceline.cuda.triton.jit.gather import gather_pages, gather_rows
from paceline.kernels.selection import SINKS

NO_PLACE: int = NONE.value  # in the place of a row that is not gathered
RECORD = 5  # numbers of a text in the records of `gather_kv`
_BLOCK, _SLOTS = 1024, 64


def gather_states(source: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy rows of hidden states to ``[R, layers * hidden]``, dense, by places in ``source``,
    int64 ``[R, layers]``; rows whose place is :data:`NO_PLACE` stay as they are."""
    rows = places.numel()
    width = out.numel() // rows
    gather_rows[(rows, triton.cdiv(width, _BLOCK))](
        source, places, out, WIDTH=width, ALIGN=_align(width), BLOCK=_BLOCK
    )


def gather_kv(source: Tensor, records: Tensor, pages: Tensor, out: Tensor) -> None:
    """Copy selected keys and values to ``[S, 2, Hkv, slots, D]``, dense.

    ``records`` are int64 ``[S, 5]``, see :func:`~paceline.cuda.triton.jit.gather.gather_pages`
    (zeros: none of a text), and ``pages`` int32 ``[S, n]``; their places are in ``source``.
    """
    texts, kinds, heads, slots, dim = out.shape
    gather_pages[(texts, triton.cdiv(slots, _SLOTS), kinds * heads)](
        source, records, pages, out, slots, pages.shape[1], HEADS=heads, DIM=dim,
        WIDE=triton.next_power_of_2(dim), SINKS=SINKS, ALIGN=_align(dim),
        BLOCK=_SLOTS,
    )  # fmt: skip


def _align(width: int) -> int:
    return 16 if width % 16 == 0 else 1
