"""Sequences whose trees a whole language model drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import AttentionObserver, Decoder, KVCacheView
from paceline.drafter.methods.base import Generation, Update
from paceline.drafter.methods.beam_drafter import BeamDrafter, BeamSequence
from paceline.drafter.methods.slots import chain_segments
from paceline.kernels import TreeSegment, plan_trees


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


class DecoderSequence(BeamSequence):
    """A sequence that feeds the newest tokens of its text, then the nodes of its tree."""

    def __init__(self, drafter: BeamDrafter[Any], generation: Generation) -> None:
        super().__init__(drafter, generation)
        self.text = list(generation.tokens)

    def extend(self, update: Update) -> None:
        self.text.extend(update.tokens)
        super().extend(update)

    @property
    @abstractmethod
    def begin_position(self) -> int:
        """First token of the text that is fed with the first level."""

    @property
    @abstractmethod
    def begin_slot(self) -> int:
        """Cache slot of the first token of the next block, without its trunk."""

    def block(self, index: int) -> Block:
        """Returns what to feed for the next level.

        Args:
            index: Index of this sequence's cache in the forward pass.
        """
        beam, slot, begin = self.tree, self.begin_slot, self.begin_position
        if beam.level == 0:
            segments = chain_segments(index, slot, slot + self.length - begin)
            return Block(self.text[begin:], list(range(begin, self.length)), segments, 1)
        tokens, parents = beam.block()
        segment = TreeSegment(index, slot + beam.trunk, parents, len(tokens))
        positions = [self.length + beam.trunk + depth for depth in segment.depths]
        return Block(tokens, positions, [segment], len(beam.frontier))

    def add_level(self, logits: Tensor) -> None:
        """Adds a level to the tree from the logits of :meth:`block`, ``[frontier, V]``."""
        if self.tree.level == 0:
            self.commit_text()
        else:
            self.tree.mark_fed()
        self.tree.add_level(self.rank(logits))

    @abstractmethod
    def commit_text(self) -> None:
        """Keeps the KV of the text that was fed with the first level."""
