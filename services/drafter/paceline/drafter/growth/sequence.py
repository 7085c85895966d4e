"""Sequences whose trees grow by the forward passes of a model, and how a batch of them grows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from paceline.drafter.generation import Budget, DraftSequence, Update
from paceline.drafter.growth.host import HostGrowth
from paceline.drafter.growth.text import Growth, TextPasses
from paceline.drafter.kv import KvGone
from paceline.tree import EMPTY, TokenTree

P = TypeVar("P", bound=TextPasses)


class GrownSequence(DraftSequence, Generic[P]):
    """A generation whose trees grow by the passes of a method."""

    def __init__(self, growth: TreeGrowth, passes: P) -> None:
        self.passes = passes  # what the method reads and feeds
        self.text = passes.text
        self._growth, self.way = growth, growth.start(passes)

    @property
    def backlog(self) -> int:
        return self.passes.backlog

    def warm(self, limit: int) -> None:
        self.passes.warm(limit)

    def extend(self, update: Update) -> None:
        self.passes.extend(update.tokens)
        self.text.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        (tree,) = self._growth.draft_many([(self, budget)])
        if isinstance(tree, KvGone):
            raise tree
        return tree

    def begin(self, budget: Budget) -> bool:
        """Begin the tree of a round. Returns False if nothing can be drafted.

        Raises:
            KvGone: The cache whose KV or hidden states are read is gone.
        """
        text = self.text
        text.beam = None
        limits = text.limits(budget)
        if limits is None:
            return False
        ahead, text.ahead = text.ahead, None
        if ahead is None or not self.passes.keep_ahead():
            ahead = None
            if not self.passes.prepare():
                return False
        if self.way.at_once and time.monotonic() >= budget.deadline:
            limits = replace(limits, depth=1)
        self.way.begin(self.passes, limits, ahead)
        return True

    def close(self) -> None:
        self.text.beam = None
        self.passes.close()


class TreeGrowth:
    """How the trees of a drafter's sequences grow: each in the first way that takes it.

    All but :meth:`start` runs on one thread at a time.
    """

    def __init__(self, host: HostGrowth, *preferred: Growth) -> None:
        """Set the ways: ``preferred`` ones in their order, then the host, which takes all."""
        self.host = host
        self.ways: list[Growth] = [*preferred, host]

    def start(self, passes: TextPasses) -> Growth:
        """Return the way in which the trees of a generation grow."""
        return next(way for way in self.ways if way.start(passes))

    def draft_many(
        self, rounds: Sequence[tuple[DraftSequence, Budget]]
    ) -> Sequence[TokenTree | KvGone]:
        """Grow one tree for each round, with shared forward passes.

        That a cache still exists is checked once, when all trees are on the host.
        """
        own = cast(Sequence[tuple[GrownSequence[Any], Budget]], rounds)
        found: dict[GrownSequence[Any], TokenTree | KvGone] = {}
        parts: dict[Growth, list[tuple[GrownSequence[Any], Budget]]] = {}
        for sequence, budget in own:
            parts.setdefault(sequence.way, []).append((sequence, budget))
        for way, part in parts.items():
            begun = []
            for sequence, budget in part:
                try:
                    if sequence.begin(budget):
                        begun.append((sequence, budget))
                except KvGone as gone:
                    found[sequence] = gone
            if begun:
                trees = way.grow([(sequence.passes, budget) for sequence, budget in begun])
                found.update(zip((sequence for sequence, _ in begun), trees, strict=True))
        for sequence, _ in own:
            try:
                sequence.passes.finish()
            except KvGone as gone:
                found[sequence] = gone
        return [found.get(sequence, EMPTY) for sequence, _ in own]

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """See :meth:`~paceline.drafter.methods.base.Drafter.draft_ahead`."""
        own = cast(Sequence[GrownSequence[Any]], sequences)
        going = [each for each in own if each.passes.begin_ahead()]
        if going:
            self.host.model.grow_level([each.passes for each in going])
        return list(going)
