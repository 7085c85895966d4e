"""Tokens of several generations in one forward pass: where their KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.decoder import AttentionObserver, Decoder, KVCacheView
from paceline.kernels import CHUNK, MAX_TREE_NODES, TreePlan, TreeSegment, plan_trees


@dataclass(frozen=True)
class Block:
    """One generation's tokens in a forward pass.

    Attributes:
        tokens: Token ids.
        positions: Absolute position of each.
        segments: Cache slots of their KV.
        logit_rows: How many of the last tokens need logits.
    """

    tokens: list[int]
    positions: list[int]
    segments: list[TreeSegment]
    logit_rows: int


def forward_blocks(
    decoder: Decoder,
    blocks: Sequence[Block],
    caches: Sequence[KVCacheView],
    observer: AttentionObserver | None = None,
) -> list[Tensor]:
    """Runs one forward pass over the blocks of several generations.

    Args:
        decoder: The model.
        blocks: One per generation; segments refer to ``caches`` by index.
        caches: One per generation.
        observer: Receives the queries of the pass.

    Returns:
        Logits ``[logit_rows, V]`` of each block.
    """
    stops = list(accumulate(len(block.tokens) for block in blocks))
    counts = [block.logit_rows for block in blocks]
    rows = [r for stop, n in zip(stops, counts, strict=True) for r in range(stop - n, stop)]
    device = decoder.device
    logits = decoder.forward(
        torch.tensor([token for block in blocks for token in block.tokens], device=device),
        plan_trees(
            [segment for block in blocks for segment in block.segments],
            positions=[position for block in blocks for position in block.positions],
            device=device,
        ),
        caches,
        logit_rows=torch.tensor(rows, device=device),
        observer=observer,
    ).logits
    return list(logits.split(counts))


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
