"""What ``selfspec`` keeps for one generation: text, the round's sparse KV, and its tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.drafter.kv.reader import KvReader
from paceline.drafter.methods.base import Budget, DraftSequence, Generation, Update
from paceline.drafter.methods.beam import Beam
from paceline.drafter.methods.ranking import Ranker
from paceline.drafter.tree import Tree
from paceline.kernels import TreeSegment
from paceline.service.sampling import sampling_params

if TYPE_CHECKING:
    from paceline.drafter.methods.selfspec import SelfSpecDrafter

MOST_NEW = 128
"""Tokens behind the target's KV that are fed in a round. With more of them, as after a loss of the
link, catching up would take longer than it is worth: nothing is drafted. Unit: tokens."""

_GROWTH = 256


@dataclass(frozen=True)
class Feed:
    """One generation's tokens in a forward pass.

    Attributes:
        tokens: What to feed.
        segment: Where in the sparse cache it goes.
        positions: Where each token stands in the text.
        wanted: How many of the last tokens need logits.
    """

    tokens: list[int]
    segment: TreeSegment
    positions: list[int]
    wanted: int


class SelfSpecSequence(DraftSequence):
    """One generation of ``selfspec``; to the decoder, a cache.

    Each round begins with a table of the target's chosen positions, in any order, since their keys
    are rotated already. Behind them come the tokens that the target's KV does not reach yet, the
    anchor always among them, then the nodes of the tree.
    """

    def __init__(self, drafter: SelfSpecDrafter, generation: Generation, kv: KvReader) -> None:
        self.kv = kv
        self.text = list(generation.tokens)
        self.beam: Beam | None = None
        """The tree of the round; None if it has none."""
        self._drafter = drafter
        self._config, self._options = drafter.decoder.config, drafter.options
        self._table = self._new_table(0)
        self._held = 0
        self._known = 0
        self._ranker = Ranker(
            sampling_params(generation.sampling),
            prompt=self.text[: generation.prompt_length],
            output=self.text[generation.prompt_length :],
            vocab_size=min(generation.vocab_size, self._config.vocab_size),
            candidates=self._options.candidates,
        )

    @property
    def wants_level(self) -> bool:
        """Whether the tree would gain from another level."""
        return self.beam is not None and self.beam.wants_level

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each ``[Hkv, capacity, D]``."""
        keys, values = self._table[index]
        return keys, values

    def extend(self, update: Update) -> None:
        self.beam = None
        self.text.extend(update.tokens)
        self._ranker.extend(update.tokens)

    def draft(self, budget: Budget) -> Tree:
        return self._drafter.draft_many([(self, budget)])[0]

    def begin(self, budget: Budget) -> bool:
        """Start a tree, unless there is no KV or no room for one.

        Raises:
            Exception: What ``kv.check()`` raises: the target's KV is there no more.
        """
        self.beam = None
        options, length = self._options, len(self.text)
        depth = min(budget.depth, options.depth, self._config.max_position - length + 1)
        if budget.nodes <= 0 or depth <= 0:
            return False
        self.kv.check()
        if not self._gather(length - 1):
            return False
        widths = self._ranker.widths(options.widths)
        self.beam = Beam(Budget(budget.nodes, depth), widths, options.min_survival)
        return True

    def feed(self, index: int) -> Feed:
        """What to feed for the next level; ``index`` is this sequence's among the caches."""
        beam, length = self._growing(), len(self.text)
        new = length - self._known
        if beam.level == 0:
            segment = TreeSegment(index, self._held, None, new)
            return Feed(self.text[self._known :], segment, list(range(self._known, length)), 1)
        tokens, parents = beam.block()
        segment = TreeSegment(index, self._held + new + beam.trunk, parents, len(tokens))
        positions = [length + beam.trunk + depth for depth in segment.depths]
        return Feed(tokens, segment, positions, len(beam.frontier))

    def add_level(self, logits: Tensor) -> None:
        """Take in the outcome of the forward pass, ``[wanted, V]``."""
        beam = self._growing()
        if beam.level:
            beam.fed_block()
        paths = [beam.path(node) for node in beam.frontier] if beam.level else [[]]
        beam.add_level(self._ranker.rank(logits, len(self.text) + beam.level, paths, beam.width))

    def close(self) -> None:
        self.beam = None
        self._table = self._new_table(0)

    def _gather(self, below: int) -> bool:
        """Copy the chosen positions of all layers; False if there are none, or too few."""
        budget = self._drafter.needs.kv_budget_at(below)
        self._known = self.kv.refresh(below, budget)
        layers = [self.kv.parts(layer) for layer in range(self._config.layers)]
        self._held = sum(keys.shape[1] for keys, _ in layers[0])
        new = len(self.text) - self._known
        if not self._held or new > MOST_NEW:
            return False
        slots = self._held + new + self._options.drafted
        if slots > self._table.shape[3]:
            self._table = self._new_table(-(-slots // _GROWTH) * _GROWTH)
        for table, parts in zip(self._table, layers, strict=True):
            begin = 0
            for keys, values in parts:
                stop = begin + keys.shape[1]
                table[0, :, begin:stop] = keys
                table[1, :, begin:stop] = values
                begin = stop
        return True

    def _new_table(self, slots: int) -> Tensor:
        config = self._config
        shape = (config.layers, 2, config.kv_heads, slots, config.head_dim)
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=config.dtype, device=self._drafter.decoder.device)

    def _growing(self) -> Beam:
        if self.beam is None:
            raise RuntimeError("this sequence has no tree; call begin first")
        return self.beam
