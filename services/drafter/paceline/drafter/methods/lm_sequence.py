"""What ``lm`` keeps for one generation: text, KV and the newest tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.decoder import LocalCache
from paceline.drafter.methods.base import Budget, DraftSequence, Generation, Update
from paceline.drafter.methods.beam import Beam
from paceline.drafter.methods.lm_budget import OBSERVED, POLICIES, Choice, Look, Looks, TopChunks
from paceline.drafter.methods.ranking import Ranker
from paceline.drafter.tree import Tree
from paceline.kernels import CHUNK, TreeSegment, plan_trees
from paceline.service.sampling import sampling_params

if TYPE_CHECKING:
    from paceline.drafter.methods.lm import LmDrafter


@dataclass(frozen=True)
class Block:
    """One generation's tokens in a forward pass.

    Attributes:
        tokens: What to feed.
        positions: Where each stands in the text.
        segments: Where in :attr:`LmSequence.seen` they go.
        wanted: How many of the last tokens need logits.
    """

    tokens: list[int]
    positions: list[int]
    segments: list[TreeSegment]
    wanted: int


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

    Under a KV budget a round looks at a second cache, :attr:`seen`, with copies of chosen
    positions. What it feeds goes there, and once it is known to stay, back into the whole one. So
    the budget may change between rounds.
    """

    def __init__(self, drafter: LmDrafter, generation: Generation) -> None:
        self.text = list(generation.tokens)
        self.beam: Beam | None = None
        """The tree of the newest round; None if it has none."""
        self._drafter = drafter
        self._decoder = drafter.decoder
        self._cache: LocalCache | None = None
        self._sparse: LocalCache | None = None
        self.chosen = torch.empty(0, dtype=torch.int64)
        """Positions of the text that :attr:`seen` began with, where that is a copy."""
        self._choice: Choice = POLICIES[drafter.options.kv_policy]()
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
    def seen(self) -> LocalCache:
        """What the round looks at: its KV, or a copy of chosen positions."""
        return self.cache if self._sparse is None else self._sparse

    @property
    def cached(self) -> int:
        """Tokens of the text whose KV is in the cache."""
        return 0 if self._cache is None else len(self._cache)

    @property
    def slots(self) -> int:
        """KV slots it holds."""
        return sum(cache.capacity for cache in (self._cache, self._sparse) if cache is not None)

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
            self._keep(self.beam.fed_path(update.tokens))
            self.beam = None
        self.text.extend(update.tokens)
        self._ranker.extend(update.tokens)

    def warm(self, limit: int) -> None:
        count = min(limit, self.backlog)
        if count == 0 or not self._reserve(count):
            return
        begin = self.cached
        looks: list[Look] = []
        if isinstance(self._choice, TopChunks) and count == self.backlog:
            rows = range(max(0, count - OBSERVED), count)
            looks = [Look(self._choice, rows, self.cache, torch.arange(begin + count))]
        self._decoder.forward(
            torch.tensor(self.text[begin : begin + count], device=self._decoder.device),
            plan_trees(chain_segments(0, begin, begin + count), device=self._decoder.device),
            [self.cache],
            logit_rows=torch.tensor([count - 1], device=self._decoder.device),
            observer=Looks(looks) if looks else None,
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
        if not self._reserve(len(self.text) - self.cached + options.drafted) or not self._choose():
            return False
        limits = Budget(
            nodes=min(budget.nodes, options.max_nodes), depth=min(depth, options.levels)
        )
        widths = self._ranker.widths(options.widths)
        self.beam = Beam(limits, widths, options.min_survival)
        return True

    def block(self, index: int) -> Block:
        """What to feed for the next level; ``index`` is that of :attr:`seen` in the pass."""
        beam, slot, end = self._growing(), len(self.seen), len(self.text)
        if beam.level == 0:
            tokens = self.text[self.cached :]
            segments = chain_segments(index, slot, slot + len(tokens))
            return Block(tokens, list(range(self.cached, end)), segments, 1)
        tokens, parents = beam.block()
        segment = TreeSegment(index, slot + beam.trunk, parents, len(tokens))
        positions = [end + beam.trunk + depth for depth in segment.depths]
        return Block(tokens, positions, [segment], len(beam.frontier))

    def looks(self, stop: int) -> list[Look]:
        """What is to be noted of its block, which ends before row ``stop`` of the pass."""
        sparse, choice = self._sparse, self._choice
        if sparse is None or not isinstance(choice, TopChunks) or self._growing().level > 0:
            return []
        new = torch.arange(self.cached, len(self.text))
        positions = torch.cat([self.chosen, new])
        return [Look(choice, range(stop - 1, stop), sparse, positions)]

    def add_level(self, logits: Tensor) -> None:
        """Take in the outcome of the forward pass, ``[count, V]``."""
        beam = self._growing()
        if beam.level == 0:
            self._keep(range(len(self.text) - self.cached))
            paths: list[list[int]] = [[]]
        else:
            beam.fed_block()
            paths = [beam.path(node) for node in beam.frontier]
        beam.add_level(self._ranker.rank(logits, len(self.text) + beam.level, paths, beam.width))

    def close(self) -> None:
        self._given_up = True
        self.beam = None
        self._drafter.kv.used -= self.slots
        self._cache = self._sparse = None

    def _growing(self) -> Beam:
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam

    def _keep(self, path: Sequence[int]) -> None:
        """These nodes of the block that was fed last belong to the text."""
        if self._sparse is not None:
            begin = len(self._sparse)
            self._sparse.commit(path)
            self.cache.take(self._sparse, range(begin, begin + len(path)))
        else:
            self.cache.commit(path)

    def _choose(self) -> bool:
        """Choose what the round looks at; False where there is no room for it."""
        budget, length = self._drafter.options.context, self.cached
        before = self.slots
        if not 0 < budget < length:
            self._sparse = None
            return self._account(before)
        self.chosen = self._choice.choose(length, budget)
        if self._sparse is None:
            self._sparse = LocalCache(self._decoder.config, self._decoder.device)
        self._sparse.truncate(0)
        self._sparse.take(self.cache, self.chosen)
        self._sparse.reserve(len(self.text) - length + self._drafter.options.drafted)
        return self._account(before)

    def _reserve(self, slots: int) -> bool:
        """Make room behind the cached tokens; if that is too much, give up for good."""
        before = self.slots
        if self._cache is None:
            self._cache = LocalCache(self._decoder.config, self._decoder.device)
        self._cache.reserve(slots)
        return self._account(before)

    def _account(self, before: int) -> bool:
        """Count slots that came or went; if they are too many, give up for good."""
        self._drafter.kv.used += self.slots - before
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
