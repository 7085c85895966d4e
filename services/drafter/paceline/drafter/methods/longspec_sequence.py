"""What ``longspec`` keeps for one generation: the newest tokens, a ring, and the newest tree."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.drafter.kv.reader import KvReader
from paceline.drafter.methods.base import Budget, DraftSequence, Generation, Update
from paceline.drafter.methods.beam import Beam
from paceline.drafter.methods.longspec_layer import Context, Feed
from paceline.drafter.methods.ranking import Ranker
from paceline.drafter.tree import Tree
from paceline.service.sampling import sampling_params

if TYPE_CHECKING:
    from paceline.drafter.methods.longspec import LongSpecDrafter


class LongSpecSequence(DraftSequence):
    """One generation of ``longspec``.

    What it holds has one size whatever the context: a ring of keys and values and as many tokens
    (the history of a penalised generation apart, which grows with its distinct tokens). A round
    feeds the tokens that came since the last one, then level after level of its tree.
    """

    def __init__(self, drafter: LongSpecDrafter, generation: Generation, kv: KvReader) -> None:
        self.kv = kv
        self.length = len(generation.tokens)
        """Tokens of the text."""
        self.beam: Beam | None = None
        """The tree of the round; None if it has none."""
        self._drafter = drafter
        config, options = drafter.layer.config, drafter.options
        self.ring = drafter.layer.new_ring(options.drafted)
        self._tail = deque(generation.tokens, maxlen=config.window)
        self._context: Context | None = None
        self._paths: list[tuple[int, ...]] = []
        prompt = generation.prompt_length
        self._ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=generation.tokens[:prompt],
            output=generation.tokens[prompt:],
            vocab_size=min(generation.vocab_size, config.vocab_size),
            candidates=options.candidates,
        )

    @property
    def backlog(self) -> int:
        return max(0, self.length - 1 - self._written)

    @property
    def wants_level(self) -> bool:
        """Whether the tree would gain from another level."""
        return self.beam is not None and self.beam.wants_level

    def extend(self, update: Update) -> None:
        self.beam = None
        self._tail.extend(update.tokens)
        self.length += len(update.tokens)
        self._ranker.extend(update.tokens)

    def warm(self, limit: int) -> None:
        begin = self._written
        end = begin + min(limit, self.backlog)
        if begin < end:
            self._drafter.layer.remember(self._text_feed(begin, end, torch.empty(0, 0), None))
            self.ring.length = end

    def draft(self, budget: Budget) -> Tree:
        return self._drafter.draft_many([(self, budget)])[0]

    def begin(self, budget: Budget) -> bool:
        """Start a tree, unless there is no room for one.

        Raises:
            Exception: What ``kv.check()`` raises: the target's KV is there no more.
        """
        self.beam = None
        config, options = self._drafter.layer.config, self._drafter.options
        depth = min(budget.depth, options.levels, config.max_position - self.length + 1)
        if budget.nodes <= 0 or depth <= 0:
            return False
        self.kv.check()
        below = self.length - 1  # the verifier may know of the future already
        self.kv.refresh(below, options.context)
        parts = self.kv.parts(config.target_layer)
        self._context = Context.of(parts, self._drafter.layer.device)
        limits = Budget(nodes=min(budget.nodes, options.max_nodes), depth=depth)
        widths = self._ranker.widths(options.widths)
        self.beam = Beam(limits, widths, options.min_survival)
        self._paths = []
        return True

    def feed(self) -> Feed:
        """What to feed for the next level."""
        beam, ring = self._growing(), self.ring
        if beam.level == 0:
            begin = min(self._written, self.length - 1)
            mask = ring.mask(self.length - 1, self.length, [()])
            return self._text_feed(begin, self.length, mask, self._context)
        position = self.length - 1 + beam.level
        nodes = beam.frontier
        return Feed(
            tokens=beam.tokens[nodes.start : nodes.stop],
            positions=[position] * len(nodes),
            runs=[ring.node_run(nodes)],
            ring=ring,
            mask=ring.mask(position, self.length, self._paths[nodes.start : nodes.stop]),
            context=self._context,
        )

    def add_level(self, logits: Tensor) -> None:
        """Take in what came of the feed, ``[R, V]``."""
        beam = self._growing()
        if beam.level == 0:
            self.ring.length = self.length
            prefixes: list[list[int]] = [[]]
        else:
            prefixes = [beam.path(node) for node in beam.frontier]
        beam.add_level(self._ranker.rank(logits, self.length + beam.level, prefixes, beam.width))
        for node in range(len(self._paths), len(beam.tokens)):
            parent = beam.parents[node]
            self._paths.append((*(self._paths[parent] if parent >= 0 else ()), node))

    def end(self) -> None:
        """Let go of the target's KV.

        Raises:
            Exception: What ``kv.check()`` raises: it changed while it was being read.
        """
        if self._context is not None:
            self._context = None
            self.kv.check()

    def close(self) -> None:
        self.beam = self._context = None

    @property
    def _written(self) -> int:
        """Positions below this are in the ring, or too old to be wanted there."""
        return max(self.ring.length, self.length - self.ring.window)

    def _text_feed(self, begin: int, end: int, mask: Tensor, context: Context | None) -> Feed:
        first = begin - (self.length - len(self._tail))
        return Feed(
            tokens=list(islice(self._tail, first, first + end - begin)),
            positions=range(begin, end),
            runs=self.ring.text_runs(begin, end),
            ring=self.ring,
            mask=mask,
            context=context,
        )

    def _growing(self) -> Beam:
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam
