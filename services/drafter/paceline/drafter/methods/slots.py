"""Cache slots of the tokens of several generations in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kernels import CHUNK, MAX_TREE_NODES, TreePlan, TreeSegment, plan_trees

SlotRun = tuple[int, int]
"""First slot, and number of tokens in consecutive slots from there on."""


def ring_slots(begin: int, end: int, window: int) -> list[SlotRun]:
    """Returns the slots of positions ``begin`` to ``end`` where position p has slot p % window.

    Args:
        begin: First position.
        end: One past the last, at most ``begin + window``.
        window: Slots of the ring; 0: position p has slot p.
    """
    runs: list[SlotRun] = []
    while begin < end:
        slot = begin % window if window else begin
        room = window - slot if window else end - begin
        count = min(end - begin, room, MAX_TREE_NODES)
        runs.append((slot, count))
        begin += count
    return runs


def plan_slots(
    runs: Sequence[Sequence[SlotRun]], positions: Sequence[int], device: torch.device
) -> TreePlan:
    """Plans where keys and values are written.

    Args:
        runs: Slots of each sequence's tokens.
        positions: Position in its text of every token, sequence after sequence.
        device: Device of the caches.
    """
    segments = [
        TreeSegment(index, slot, None, count)
        for index, each in enumerate(runs)
        for slot, count in each
    ]
    return plan_trees(segments, positions=positions, device=device)


def chain_segments(index: int, begin: int, end: int) -> list[TreeSegment]:
    """Returns positions ``begin`` to ``end`` of cache ``index``, cut at multiples of ``CHUNK``.

    With these cuts the bits of their KV do not depend on how a text is split over forward passes.
    """
    segments = []
    while begin < end:
        stop = min(end, (begin // CHUNK + 1) * CHUNK)
        segments.append(TreeSegment(index, begin, None, stop - begin))
        begin = stop
    return segments
