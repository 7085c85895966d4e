"""What ``lm`` keeps for one generation: text, KV and the newest tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.decoder import LocalCache
from paceline.drafter.methods.base import Budget, DraftSequence, Generation, Update
from paceline.drafter.methods.beam import Beam
from paceline.drafter.methods.ranking import Ranker
from paceline.drafter.tree import Tree
from paceline.kernels import CHUNK, TreeSegment, plan_trees
from paceline.service.sampling import sampling_params

if TYPE_CHECKING:
    from paceline.drafter.methods.lm import LmDrafter


class KvAccount:
    """How many KV slots all sequences of a drafter hold together. Used on one thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Most slots."""
        self.used = 0


class LmSequence(DraftSequence):
    """One generation of ``lm``.

    The first ``cached`` tokens of the text have their KV in the cache; behind them lie the fed
    nodes of the newest tree. The rest of the text, the anchor always among it when a round begins,
    is fed with the round. A sequence that finds no room for its KV gives it up and drafts no more.
    """

    def __init__(self, drafter: LmDrafter, generation: Generation) -> None:
        self.text = list(generation.tokens)
        self.beam: Beam | None = None
        """The tree of the newest round; None if it has none."""
        self._drafter = drafter
        self._decoder = drafter.decoder
        self._cache: LocalCache | None = None
        self._given_up = False
        self._ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=self.text[: generation.prompt_length],
            output=self.text[generation.prompt_length :],
            vocab_size=min(generation.vocab_size, self._decoder.config.vocab_size),
            candidates=drafter.options.candidates,
        )

    @property
    def cache(self) -> LocalCache:
        """Its KV. Only there once :meth:`begin` or :meth:`warm` has found room."""
        if self._cache is None:
            raise RuntimeError("this sequence has no KV yet, or none any more")
        return self._cache

    @property
    def cached(self) -> int:
        """Tokens of the text whose KV is in the cache."""
        return 0 if self._cache is None else len(self._cache)

    @property
    def exhausted(self) -> bool:
        """It drafts no more: memory is out, or the text longer than the model takes."""
        return self._given_up or len(self.text) > self._decoder.config.max_position

    @property
    def backlog(self) -> int:
        return 0 if self.exhausted else max(0, len(self.text) - 1 - self.cached)

    @property
    def wants_level(self) -> bool:
        """Whether the tree would gain from another level."""
        return self.beam is not None and self.beam.wants_level

    def extend(self, update: Update) -> None:
        if self.beam is not None and update.tokens:
            self.cache.commit(self.beam.fed_path(update.tokens))
            self.beam = None
        self.text.extend(update.tokens)
        self._ranker.extend(update.tokens)

    def warm(self, limit: int) -> None:
        count = min(limit, self.backlog)
        if count == 0 or not self._reserve(count):
            return
        begin = self.cached
        self._decoder.forward(
            torch.tensor(self.text[begin : begin + count], device=self._decoder.device),
            plan_trees(chain_segments(0, begin, begin + count), device=self._decoder.device),
            [self.cache],
            logit_rows=torch.tensor([count - 1], device=self._decoder.device),
        )
        self.cache.commit(range(count))

    def draft(self, budget: Budget) -> Tree:
        return self._drafter.draft_many([(self, budget)])[0]

    def begin(self, budget: Budget) -> bool:
        """Start a tree, unless there is no room for one; works off the backlog first."""
        self.beam = None
        while self.backlog > CHUNK:
            self.warm(CHUNK)
        depth = min(budget.depth, self._decoder.config.max_position - len(self.text) + 1)
        if self.exhausted or budget.nodes <= 0 or depth <= 0:
            return False
        if self.cached == len(self.text):
            # Nothing new: the logits after the anchor are needed once more.
            self.cache.truncate(len(self.text) - 1)
        options = self._drafter.options
        if not self._reserve(len(self.text) - self.cached + options.drafted):
            return False
        limits = Budget(
            nodes=min(budget.nodes, options.max_nodes), depth=min(depth, options.levels)
        )
        widths = self._ranker.widths(options.widths)
        self.beam = Beam(limits, widths, options.min_survival)
        return True

    def block(self, index: int) -> tuple[list[int], list[TreeSegment], int]:
        """What to feed for the next level.

        Args:
            index: Index of this sequence's cache in the forward pass.

        Returns:
            Tokens, their segments, and how many of the last tokens need logits.
        """
        beam = self._growing()
        end = len(self.text)
        if beam.level == 0:
            return self.text[self.cached :], chain_segments(index, self.cached, end), 1
        tokens, parents = beam.block()
        segment = TreeSegment(index, end + beam.trunk, parents, len(tokens))
        return tokens, [segment], len(beam.frontier)

    def add_level(self, logits: Tensor) -> None:
        """Take in the outcome of the forward pass, ``[count, V]`` on the CPU."""
        beam = self._growing()
        if beam.level == 0:
            self.cache.commit(range(len(self.text) - self.cached))
            paths: list[list[int]] = [[]]
        else:
            beam.fed_block()
            paths = [beam.path(node) for node in beam.frontier]
        beam.add_level(self._ranker.rank(logits, len(self.text) + beam.level, paths, beam.width))

    def close(self) -> None:
        self._given_up = True
        self.beam = None
        if self._cache is not None:
            self._drafter.kv.used -= self._cache.capacity
            self._cache = None

    def _growing(self) -> Beam:
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam

    def _reserve(self, slots: int) -> bool:
        """Make room behind the cached tokens; if that is too much, give up for good."""
        before = 0 if self._cache is None else self._cache.capacity
        if self._cache is None:
            self._cache = LocalCache(self._decoder.config, self._decoder.device)
        self._cache.reserve(slots)
        self._drafter.kv.used += self._cache.capacity - before
        if self._drafter.kv.used <= self._drafter.kv.limit:
            return True
        self.close()
        return False


def chain_segments(index: int, begin: int, end: int) -> list[TreeSegment]:
    """Positions ``begin`` to ``end`` as chains cut at multiples of ``CHUNK``.

    So cut, the bits of their KV do not depend on how a text was split over forward passes.
    """
    segments = []
    while begin < end:
        stop = min(end, (begin // CHUNK + 1) * CHUNK)
        segments.append(TreeSegment(index, begin, None, stop - begin))
        begin = stop
    return segments
