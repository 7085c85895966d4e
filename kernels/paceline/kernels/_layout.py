"""What the CPU backend works out once per plan: who sees what, and in which chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.trees import CHUNK, TreeSegment

ROW_MULTIPLE = 4
"""Rows are padded to this: below it, matrix products take another path with other bits."""


@dataclass(frozen=True)
class Crossing:
    """Rows that share one whole path through the chunk where the prefix ends.

    Attributes:
        rows: Packed rows, int64 ``[n]``.
        slots: Cache slot of the key at each position of that chunk, int64 ``[CHUNK]``.
        hidden: Outside the sliding window, bool ``[n, CHUNK]``; None if nothing is.
    """

    rows: Tensor
    slots: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class BlockLayout:
    """Attention layout of one segment for one GQA group size and window.

    Rows are packed node by node, the ``group`` query heads of a kv head side by side, and padded.

    Attributes:
        rows: ``nodes * group``.
        padded: ``rows`` rounded up to ``ROW_MULTIPLE``.
        first_chunk: First chunk that any row sees.
        own_chunk: Chunk in which the prefix ends; chunks before it are whole for every row.
        columns: Slots from the start of ``own_chunk`` to the end of the segment.
        own_hidden: Bool ``[padded, columns]``, what a row does not see in its own chunk; None if
            it sees every column.
        full_hidden: Bool ``[own_chunk - first_chunk, padded, CHUNK]``, outside the window; None if
            nothing is.
        crossings: Rows beyond ``own_chunk``, grouped by path.
        beyond: Packed rows beyond ``own_chunk``, int64, or None.
    """

    rows: int
    padded: int
    first_chunk: int
    own_chunk: int
    columns: int
    own_hidden: Tensor | None
    full_hidden: Tensor | None
    crossings: tuple[Crossing, ...]
    beyond: Tensor | None


def lay_out(segment: TreeSegment, group: int, window: int | None) -> BlockLayout:
    """Work out the layout of a segment.

    Args:
        segment: The query block.
        group: Query heads per kv head.
        window: Sliding window in tokens, at least 1, or None.
    """
    rows = segment.length * group
    padded = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    own_chunk = segment.start // CHUNK
    first_chunk = 0 if window is None else max(0, segment.start - window + 1) // CHUNK
    base = own_chunk * CHUNK
    columns = segment.stop - base

    at = torch.tensor(segment.depths) + segment.start
    column_at = torch.cat([torch.arange(base, segment.start), at])
    seen = _own_chunk_sight(segment, at, column_at, window)
    own_hidden = None if bool(seen.all()) else _per_row(~seen, group, padded)

    return BlockLayout(
        rows=rows,
        padded=padded,
        first_chunk=first_chunk,
        own_chunk=own_chunk,
        columns=columns,
        own_hidden=own_hidden,
        full_hidden=_full_hidden(at, first_chunk, own_chunk, window, group, padded),
        crossings=_crossings(segment, at, base, group, window),
        beyond=_beyond(at, base, group),
    )


def _own_chunk_sight(
    segment: TreeSegment, at: Tensor, column_at: Tensor, window: int | None
) -> Tensor:
    """Bool ``[nodes, columns]``: what each node sees inside its own chunk."""
    committed = column_at.numel() - segment.length
    on_path = torch.ones(segment.length, column_at.numel(), dtype=torch.bool)
    on_path[:, committed:] = segment.ancestors()
    seen = on_path & (column_at[None, :] // CHUNK == at[:, None] // CHUNK)
    if window is not None:
        seen &= column_at[None, :] > at[:, None] - window
    return seen


def _full_hidden(
    at: Tensor, first: int, own: int, window: int | None, group: int, padded: int
) -> Tensor | None:
    if window is None or first == own:
        return None
    column_at = torch.arange(first * CHUNK, own * CHUNK)
    hidden = column_at[None, :] <= at[:, None] - window
    if not bool(hidden.any()):
        return None
    per_row = _per_row(hidden, group, padded)
    return per_row.unflatten(1, (own - first, CHUNK)).transpose(0, 1).contiguous()


def _crossings(
    segment: TreeSegment, at: Tensor, base: int, group: int, window: int | None
) -> tuple[Crossing, ...]:
    """Group the nodes beyond the border by the ancestor that stands on its last position."""
    if int(at.max()) < base + CHUNK:
        return ()
    parents = segment.parents or tuple(range(-1, segment.length - 1))
    last = base + CHUNK - 1
    border: list[int] = []
    for node, parent in enumerate(parents):
        position = segment.start + segment.depths[node]
        border.append(node if position <= last else border[parent])
    groups: dict[int, list[int]] = {}
    for node, ancestor in enumerate(border):
        if segment.start + segment.depths[node] > last:
            groups.setdefault(ancestor, []).append(node)
    committed = torch.arange(base, segment.start)
    seen = segment.ancestors()
    crossings: list[Crossing] = []
    for ancestor, members in groups.items():
        slots = torch.cat([committed, seen[ancestor].nonzero()[:, 0] + segment.start])
        nodes = torch.tensor(members)
        hidden = None
        if window is not None:
            outside = torch.arange(base, base + CHUNK)[None, :] <= at[nodes][:, None] - window
            hidden = outside.repeat_interleave(group, 0) if bool(outside.any()) else None
        rows = (nodes[:, None] * group + torch.arange(group)).flatten()
        crossings.append(Crossing(rows, slots, hidden))
    return tuple(crossings)


def _beyond(at: Tensor, base: int, group: int) -> Tensor | None:
    rows = (at >= base + CHUNK).repeat_interleave(group).nonzero()[:, 0]
    return rows if rows.numel() else None


def _per_row(mask: Tensor, group: int, padded: int) -> Tensor:
    """Repeat a per-node mask for every query head of the group; padding rows hide nothing."""
    rows = mask.repeat_interleave(group, 0)
    return torch.nn.functional.pad(rows, (0, 0, 0, padded - rows.shape[0]), value=False)
