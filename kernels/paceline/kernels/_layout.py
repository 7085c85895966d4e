"""What the CPU backend works out once per plan: who sees what, and in which chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.trees import CHUNK, TreeSegment

_Bools = NDArray[np.bool_]
_Ints = NDArray[np.int64]

ROW_MULTIPLE = 4
"""Rows are padded to this: below it, matrix products take another path, with other bits."""


@dataclass(frozen=True)
class Crossing:
    """Rows that share one whole path through the chunk in which the prefix ends.

    Attributes:
        rows: Packed rows, int64 ``[n]``, n a multiple of ``ROW_MULTIPLE``; the last one repeats.
        slots: Cache slot of the key at each position of that chunk, int64 ``[CHUNK]``.
        hidden: Outside the sliding window, bool ``[n, CHUNK]``; None if nothing is.
    """

    rows: Tensor
    slots: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class BlockLayout:
    """How some nodes of one segment attend, for one GQA group size and window.

    Packed rows go node by node, the ``group`` query heads of a kv head side by side, then padding.

    Attributes:
        first: First node of the segment that belongs to the block.
        nodes: Number of nodes.
        rows: ``nodes * group``.
        padded: ``rows`` rounded up to ``ROW_MULTIPLE``.
        first_chunk: First chunk that any row sees.
        own_chunk: Chunk in which the prefix ends; chunks before it are whole for every row.
        stop: One past the last cache slot of the segment.
        hidden: Bool ``[padded, n]``, True where a row does not see one of the last n slots; None
            if every row sees all from the start of ``first_chunk``.
        crossings: Rows beyond ``own_chunk``, grouped by path.
    """

    first: int
    nodes: int
    rows: int
    padded: int
    first_chunk: int
    own_chunk: int
    stop: int
    hidden: Tensor | None
    crossings: tuple[Crossing, ...]

    @property
    def base(self) -> int:
        """First slot looked at."""
        return self.first_chunk * CHUNK

    @property
    def columns(self) -> int:
        """Slots looked at."""
        return self.stop - self.base

    @property
    def whole_chunks(self) -> int:
        """Chunks that are whole for every row."""
        return self.own_chunk - self.first_chunk


def lay_out(
    segment: TreeSegment, group: int, window: int | None, first: int, nodes: int
) -> BlockLayout:
    """Work out the layout of nodes ``first .. first + nodes`` of a segment.

    Args:
        segment: The query block.
        group: Query heads per kv head.
        window: Sliding window in tokens, at least 1, or None.
        first: First node.
        nodes: Number of nodes.
    """
    own_chunk = segment.start // CHUNK
    first_chunk = 0 if window is None else max(0, segment.start - window + 1) // CHUNK
    rows = nodes * group
    hidden: Tensor | None = None
    crossings: tuple[Crossing, ...] = ()
    if segment.length > 1 or window is not None:
        at = np.array(segment.depths) + segment.start
        ancestors = segment.ancestors()
        begin = (own_chunk if window is None else first_chunk) * CHUNK
        unseen = ~_sight(segment, at, ancestors, begin, window)[first : first + nodes]
        if unseen.any():
            hidden = torch.from_numpy(_per_row(unseen, group))
        crossings = _crossings(segment, at, ancestors, group, window, range(first, first + nodes))
    return BlockLayout(
        first=first,
        nodes=nodes,
        rows=rows,
        padded=-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE,
        first_chunk=first_chunk,
        own_chunk=own_chunk,
        stop=segment.stop,
        hidden=hidden,
        crossings=crossings,
    )


def _sight(
    segment: TreeSegment, at: _Ints, ancestors: _Bools, begin: int, window: int | None
) -> _Bools:
    """``[length, stop - begin]``: which slots each node sees in whole chunks and its own.

    A node beyond the border of the chunk where the prefix ends does not see that chunk here: it
    is not whole in the cache, but gathered along the node's path (see :class:`Crossing`).
    """
    slot_at = np.concatenate([np.arange(begin, segment.start), at])
    seen = np.ones((segment.length, slot_at.size), np.bool_)
    seen[:, segment.start - begin :] = ancestors
    border = segment.start // CHUNK * CHUNK
    if at.max() >= border + CHUNK:
        seen &= (slot_at < border) | (slot_at // CHUNK == (at // CHUNK)[:, None])
    if window is not None:
        seen &= slot_at > (at - window)[:, None]
    return seen


def _crossings(
    segment: TreeSegment,
    at: _Ints,
    ancestors: _Bools,
    group: int,
    window: int | None,
    mine: range,
) -> tuple[Crossing, ...]:
    """Group nodes beyond the border by the ancestor that stands on the last position before it."""
    begin = segment.start // CHUNK * CHUNK
    last = begin + CHUNK - 1
    if at.max() <= last:
        return ()
    parents = segment.parents or range(-1, segment.length - 1)
    gates: list[int] = []
    members: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        gates.append(node if at[node] <= last else gates[parent])
        if at[node] > last and node in mine:
            members.setdefault(gates[node], []).append(node)
    crossings: list[Crossing] = []
    for gate, nodes in members.items():
        path = ancestors[gate].nonzero()[0] + segment.start
        slots = np.concatenate([np.arange(begin, segment.start), path])
        first_rows = (np.array(nodes) - mine.start) * group
        rows = (first_rows[:, None] + np.arange(group)).reshape(-1)
        rows = np.pad(rows, (0, -rows.size % ROW_MULTIPLE), mode="edge")
        outside = _outside(at[mine.start + rows // group], begin, window)
        crossings.append(Crossing(torch.from_numpy(rows), torch.from_numpy(slots), outside))
    return tuple(crossings)


def _outside(at: _Ints, begin: int, window: int | None) -> Tensor | None:
    """Which positions of a chunk lie before the windows of rows at ``at``, if any do."""
    if window is None:
        return None
    outside = np.arange(begin, begin + CHUNK) <= (at - window)[:, None]
    return torch.from_numpy(outside) if outside.any() else None


def _per_row(mask: _Bools, group: int) -> _Bools:
    """Repeat a per-node mask for every query head of the group; padding rows hide nothing."""
    rows = mask.repeat(group, 0)
    return np.pad(rows, ((0, -rows.shape[0] % ROW_MULTIPLE), (0, 0)))
