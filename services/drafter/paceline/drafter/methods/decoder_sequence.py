"""Sequences that feed tokens to a decoder, and the forward pass that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.drafter.methods.base import Generation, Update
from paceline.drafter.methods.beam import Chain
from paceline.drafter.methods.beam_drafter import BeamDrafter, BeamSequence
from paceline.drafter.methods.slots import chain_segments
from paceline.kernels import TreePlan, TreeSegment, plan_trees


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
    positions: Sequence[int]
    segments: list[TreeSegment]
    logit_rows: int


Forward = Callable[[Tensor, TreePlan, Tensor], Tensor]
"""Maps tokens ``[M]``, their plan and the rows that need logits, int64 ``[R]``, to the logits."""


def forward_blocks(forward: Forward, blocks: Sequence[Block], device: torch.device) -> list[Tensor]:
    """Runs one forward pass over the blocks of several generations.

    Args:
        forward: The pass of the model.
        blocks: One per generation; segments refer to its caches by index.
        device: Device of the model.

    Returns:
        Logits ``[logit_rows, V]`` of each block.
    """
    stops = accumulate(len(block.tokens) for block in blocks)
    counts = [block.logit_rows for block in blocks]
    rows = [r for stop, n in zip(stops, counts, strict=True) for r in range(stop - n, stop)]
    plan = plan_trees(
        [segment for block in blocks for segment in block.segments],
        positions=[position for block in blocks for position in block.positions],
        device=device,
    )
    tokens = torch.tensor([token for block in blocks for token in block.tokens], device=device)
    logits = forward(tokens, plan, torch.tensor(rows, device=device))
    return [logits[stop - n : stop] for stop, n in zip(accumulate(counts), counts, strict=True)]


class DecoderSequence(BeamSequence):
    """A sequence that feeds the newest tokens of its text, then the nodes of its tree."""

    def __init__(self, drafter: BeamDrafter[Any], generation: Generation) -> None:
        super().__init__(drafter, generation)
        self.text: list[int] | deque[int] = list(generation.tokens)
        """The text, or its newest tokens."""

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
            return self.text_block(index, begin, self.length, slot)
        tokens, parents = beam.block()
        segment = TreeSegment(index, slot + beam.trunk, parents, len(tokens))
        positions = [self.length + beam.trunk + depth for depth in segment.depths]
        return Block(tokens, positions, [segment], len(beam.frontier))

    def text_block(self, index: int, begin: int, end: int, slot: int) -> Block:
        """Returns positions ``begin`` to ``end`` of the text, in slots from ``slot`` on."""
        tokens = [self.text[at - self.length] for at in range(begin, end)]
        segments = chain_segments(index, slot, slot + end - begin)
        return Block(tokens, range(begin, end), segments, 1)

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


class AheadSequence(DecoderSequence):
    """A sequence whose KV depends on tokens only.

    A chain can grow beyond the tree of a round: up to one more token, the verifier's own, and the
    chain of the next round.
    """

    def __init__(self, drafter: BeamDrafter[Any], generation: Generation) -> None:
        super().__init__(drafter, generation)
        self._drafted: Chain | None = None
        self.room = 2 * drafter.options.drafted + 1
        """Slots behind the text for the nodes of a round and those drafted ahead."""

    def extend(self, update: Update) -> None:
        if update.tokens:
            self._drafted = self.beam.after(update.tokens) if self.beam is not None else None
        super().extend(update)

    def take_drafted(self) -> Chain | None:
        drafted, self._drafted = self._drafted, None
        return drafted if drafted is not None and self.keep_drafted() else None

    @abstractmethod
    def keep_drafted(self) -> bool:
        """Gets a round ready that begins with nodes drafted ahead. Returns False if it cannot."""

    def begin_ahead(self) -> bool:
        return (
            self.beam is not None
            and self.beam.level < self.room
            and self.length + self.beam.level < self._drafter.shape.max_position
            and self.beam.expand_last()
        )
