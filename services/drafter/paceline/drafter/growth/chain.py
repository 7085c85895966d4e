"""Chains of a decoder with a cache of its own, which may grow on while the verifier works.

`lm` and `selfspec` draft with a decoder. What they read of a text is in a cache, followed by slots
for the text's newest tokens and for the drafted ones. Trees with siblings grow by levels
(:mod:`~paceline.drafter.growth.levels`), and their nodes are fed again when they are text. The KV
of a chain is kept as the text's as far as the verifier accepts it. So a chain can grow beyond the
tree of a round, up to one more token, the verifier's own, and the chain of the next round.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from torch import Tensor

from paceline.decoder import Decoder, LocalCache
from paceline.drafter.generation import Budget, GenerationInfo, Update
from paceline.drafter.growth.levels import (
    HostDraft,
    LevelTrees,
    Passes,
    TreeShape,
    level_passes,
    text_pass,
)
from paceline.drafter.growth.observed import ObservedRows, TextScores
from paceline.drafter.growth.sequence import (
    GrownSequence,
    Growth,
    PassPart,
    TreeDrafter,
    TreeSettings,
    chain_blocks,
)
from paceline.kernels import Proposal
from paceline.tree import TokenTree


@dataclass(frozen=True)
class Node:
    """A drafted token, the child of the one before it; the first follows the text."""

    token: int
    log_confidence: float
    proposal: Proposal | None = None  # what it was drawn from, under rejection sampling


class DecoderSequence(GrownSequence):
    """A generation that a decoder drafts for."""

    def __init__(self, drafter: TreeDrafter, generation: GenerationInfo) -> None:
        super().__init__(drafter, generation)
        options = self._settings.options
        self.room = 2 * options.drafted + 1  # slots behind the text for drafted tokens
        self._min_score = math.log(options.min_survival) if options.min_survival > 0 else -math.inf
        self.chain: list[Node] = []  # the chain of the newest round
        self._fed = 0  # its nodes whose KV is in the cache, behind the text's KV
        self._ended = False  # whether no token can follow it
        self._continued = False  # whether it was drafted ahead and continues the text

    @property
    @abstractmethod
    def round_cache(self) -> LocalCache:
        """The cache that a round attends to."""

    @property
    @abstractmethod
    def cached(self) -> int:
        """Positions of the text whose KV was computed."""

    @property
    @abstractmethod
    def slot(self) -> int:
        """The slot of the round's cache behind them."""

    @abstractmethod
    def begin_round(self) -> bool:
        """Get ready what a round reads that begins with the text, as :meth:`prepare` does."""

    @abstractmethod
    def continue_round(self) -> bool:
        """Get ready what a round reads that begins with nodes drafted ahead. Returns False if it
        has to begin with the text."""

    @abstractmethod
    def keep_text(self, count: int) -> None:
        """Count the next positions of the text, whose KV was computed, as cached."""

    def observed_rows(self, stop: int) -> list[ObservedRows]:
        """Return the rows of its part to be scored; the part ends before row ``stop``."""
        return []

    def prepare(self) -> bool:
        continued, self._continued = self._continued, False
        if continued and self.continue_round():
            return True
        self.chain, self._fed, self._ended = [], 0, False
        return self.begin_round()

    def keep(self) -> None:
        self.keep_text(self.length - self.cached)

    def extend(self, update: Update) -> None:
        super().extend(update)
        count = len(update.tokens)
        pairs = zip(self.chain, update.tokens, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1], pairs))
        if count:
            self.keep_text(min(right, self._fed))
            self._continued = right == count < len(self.chain)
            self.chain = self.chain[count:] if self._continued else []
            self._fed = max(0, self._fed - count)

    def part(self, index: int) -> PassPart:
        """Return what to feed for the next token: what the cache lacks of text and chain.
        ``index`` is the cache's index in the pass."""
        text = self.newest(self.cached, self.length)
        tokens = [*text, *(node.token for node in self.chain[self._fed :])]
        begin = self.length + self._fed - len(text)
        slot = self.slot + begin - self.cached
        positions = range(begin, begin + len(tokens))
        return PassPart(tokens, positions, chain_blocks(index, slot, slot + len(tokens)))

    def add(self, logits: Tensor) -> None:
        """Add a node from the logits ``[1, V]`` after :meth:`part`."""
        self.keep()
        self._fed = len(self.chain)
        position, proposal = self.length + len(self.chain), None
        chain = [node.token for node in self.chain]
        if self.ranker.params.rejection:
            token, log, proposal = self.ranker.draw(logits[0], position, chain)
        else:
            ids, logs = self.ranker.rank(logits, position, 1, chain)
            token, log = int(ids), float(logs)
        if log == -math.inf:
            self._ended = True
        else:
            self.chain.append(Node(token, min(0.0, log), proposal))

    def reach(self, limits: Budget) -> int:
        """Return the number of nodes that the tree of a round may have, at most one more than the
        chain has."""
        score, stop = 0.0, min(limits.nodes, limits.depth)
        for count, node in enumerate(self.chain):
            if count == stop or (count and score < self._min_score):
                return count
            score += node.log_confidence
        likely = not self.chain or score >= self._min_score
        return len(self.chain) + (len(self.chain) < stop and likely and not self._ended)

    def goes_on(self) -> bool:
        """Return whether a node can be drafted ahead, beyond the tree of the round."""
        end = self.length + len(self.chain)
        fits = len(self.chain) < self.room and end < self._settings.max_position
        return bool(self.chain) and fits and not self._ended

    def tree(self, limits: Budget) -> TokenTree:
        nodes = self.chain[: self.reach(limits)]
        return TokenTree(
            tuple(node.token for node in nodes),
            tuple(range(-1, len(nodes) - 1)),
            tuple(math.exp(node.log_confidence) for node in nodes),
            tuple(node.proposal for node in nodes if node.proposal is not None),
        )


class DecoderModel:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def draft_passes(
        self, batch: Sequence[DecoderSequence], shape: TreeShape | None = None
    ) -> HostDraft:
        """Return the pass over the parts of generations and, with a shape, those over trees."""
        parts = [sequence.part(index) for index, sequence in enumerate(batch)]
        stops = accumulate(len(part.tokens) for part in parts)
        observed = [
            rows
            for sequence, stop in zip(batch, stops, strict=True)
            for rows in sequence.observed_rows(stop)
        ]
        levels = []
        if shape is not None:
            starts = [sequence.slot + sequence.length - sequence.cached for sequence in batch]
            levels = level_passes(starts, [sequence.length for sequence in batch], shape)
        return HostDraft(
            [text_pass(parts), *levels],
            [sequence.round_cache for sequence in batch],
            observer=TextScores(observed) if observed else None,
        )

    def grow(self, passes: Passes, trees: LevelTrees) -> None:
        """See :class:`~paceline.drafter.growth.levels.LevelModel`."""
        while trees.grows:
            tokens, plan, rows = trees.next_pass(passes)
            observer = None if trees.level else passes.observer
            result = self.decoder.forward(
                tokens, plan, passes.caches, logit_rows=rows, observer=observer
            )
            trees.add_level(result.logits)

    def read(self, draft: HostDraft) -> Tensor:
        """Run the first pass of a draft. Returns the logits ``[S, V]`` after each part."""
        passes = Passes(draft, self.decoder.device)
        plan = passes.plan(0)
        assert plan is not None
        return self.decoder.forward(
            passes.tokens(0), plan, passes.caches,
            logit_rows=passes.logit_rows(0), observer=passes.observer,
        ).logits  # fmt: skip


class ChainGrowth(Growth):
    """Growth of chains, node by node.

    A chain gets no further node that would probably end after its deadline. The estimate for a node
    is the duration of the one before.
    """

    def __init__(self, model: DecoderModel, settings: TreeSettings) -> None:
        self._model, self._settings = model, settings

    def takes(self, sequence: GrownSequence) -> bool:
        rejection = sequence.ranker.params.rejection
        return rejection or set(self._settings.options.widths) == {1}

    def grow(self, rounds: Sequence[tuple[DecoderSequence, Budget]]) -> list[TokenTree]:
        growing, end = list(rounds), -math.inf
        while growing := [
            (sequence, limits)
            for sequence, limits in growing
            if sequence.reach(limits) > len(sequence.chain) and end < limits.deadline
        ]:
            begun = time.monotonic()
            self._add_nodes([sequence for sequence, _ in growing])
            end = 2 * time.monotonic() - begun
        return [sequence.tree(limits) for sequence, limits in rounds]

    def draft_ahead(self, sequences: Sequence[DecoderSequence]) -> list[DecoderSequence]:
        going = [sequence for sequence in sequences if sequence.goes_on()]
        if going:
            self._add_nodes(going)
        return going

    def _add_nodes(self, sequences: Sequence[DecoderSequence]) -> None:
        logits = self._model.read(self._model.draft_passes(sequences))
        for sequence, row in zip(sequences, logits.split(1), strict=True):
            sequence.add(row)
