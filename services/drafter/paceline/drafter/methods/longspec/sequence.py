"""The state of one generation of ``longspec``: the newest tokens, a ring, and the newest tree."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.drafter.kv.reader import KvReader
from paceline.drafter.methods.base import Generation, Update
from paceline.drafter.methods.beam_drafter import BeamSequence
from paceline.drafter.methods.longspec.layer import Context, StepInput, ring_mask

if TYPE_CHECKING:
    from paceline.drafter.methods.longspec.drafter import LongSpecDrafter


class LongSpecSequence(BeamSequence):
    """One generation of ``longspec``.

    Its memory does not depend on the context: a ring of keys and values and as many tokens. (Only
    the history of a generation with penalties grows, with its distinct tokens.) A round feeds the
    tokens since the last round, then its tree level by level.
    """

    _drafter: LongSpecDrafter

    def __init__(self, drafter: LongSpecDrafter, generation: Generation, kv: KvReader) -> None:
        super().__init__(drafter, generation)
        self.kv = kv
        self.ring = drafter.layer.new_ring(drafter.options.drafted)
        self._tail = deque(generation.tokens, maxlen=self.ring.window)
        self._context: Context | None = None

    @property
    def backlog(self) -> int:
        return max(0, self.length - 1 - self.ring.next_position(self.length))

    def extend(self, update: Update) -> None:
        self._tail.extend(update.tokens)
        super().extend(update)

    def warm(self, limit: int) -> None:
        begin = self.ring.next_position(self.length)
        end = begin + min(limit, self.backlog)
        if begin < end:
            self._drafter.layer.write_kv(self._text_input(begin, end, torch.empty(0, 0), None))
            self.ring.length = end

    def prepare(self) -> bool:
        self.kv.check()
        below = self.length - 1  # the verifier may have committed more than this text
        layer = self._drafter.layer
        self.kv.refresh(below, self._drafter.options.context)
        parts = self.kv.parts(layer.config.target_layer)
        self._context = Context.of(parts, layer.device)
        return True

    def step(self) -> StepInput:
        """Returns what to feed for the next level."""
        beam, ring = self.tree, self.ring
        if beam.level == 0:
            begin = min(ring.next_position(self.length), self.length - 1)
            mask = ring_mask(ring.window, self.length - 1, self.length, [()])
            return self._text_input(begin, self.length, mask, self._context)
        position = self.length - 1 + beam.level
        nodes = beam.frontier
        return StepInput(
            tokens=beam.tokens[nodes.start : nodes.stop],
            positions=[position] * len(nodes),
            slots=[(ring.window + nodes.start, len(nodes))],  # after those of the text
            ring=ring,
            mask=ring_mask(ring.window, position, self.length, [beam.path(n) for n in nodes]),
            context=self._context,
        )

    def add_level(self, logits: Tensor) -> None:
        """Adds a level to the tree from the logits of :meth:`step`, ``[frontier, V]``."""
        if self.tree.level == 0:
            self.ring.length = self.length
        self.tree.add_level(self.rank(logits))

    def finish(self) -> None:
        if self._context is not None:
            self._context = None
            self.kv.check()

    def close(self) -> None:
        super().close()
        self._context = None

    def _text_input(self, begin: int, end: int, mask: Tensor, context: Context | None) -> StepInput:
        first = begin - (self.length - len(self._tail))
        return StepInput(
            tokens=list(islice(self._tail, first, first + end - begin)),
            positions=range(begin, end),
            slots=self.ring.slots(begin, end),
            ring=self.ring,
            mask=mask,
            context=context,
        )
