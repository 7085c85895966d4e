"""A version at work on one generation: the way of a round to the method and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.drafter.methods.base import Budget, Drafter, DraftSequence, Update
from paceline.drafter.registry import Sample
from paceline.drafter.tree import EMPTY, Tree
from paceline.drafter.worker import Drafted, DraftWorker
from paceline.service.sampling import rejects
from paceline.v1 import sampling_pb2

if TYPE_CHECKING:
    from paceline.drafter.kv.chosen import ChosenKv
    from paceline.drafter.kv.device import DeviceKv
    from paceline.drafter.kv.followed import FollowedKv
    from paceline.drafter.kv.followed_states import FollowedStates
    from paceline.drafter.kv.shared import SharedKv
    from paceline.drafter.kv.states import SharedStates

INLINE_SLICE = 32
"""Tokens of backlog that a method may work off on the event loop in one go."""


_STATES_SECONDS = 0.25
"""Longest wait of a round for hidden states on their way, if its deadline allows it."""


@dataclass(frozen=True)
class Follows:
    """What a generation got of the target's KV, or of the verifier's choice of it, over a wire."""

    updates: int = 0
    bytes: int = 0
    positions: int = 0
    """Of each layer, held now."""


class Session:
    """A drafter's sequence for one generation.

    Belongs to who made it, who closes it however the generation ends; nothing may be asked of it
    then. A sequence of an inline method lives on the event loop; all others are handed to the
    worker. The KV that the sequence reads is closed after it, where it was.

    Trees are answered with calibrated confidences. Under rejection sampling the answer is a tree's
    best path, as it was drafted: nothing was recorded there to calibrate by.
    """

    def __init__(
        self,
        drafter: Drafter,
        sequence: DraftSequence,
        worker: DraftWorker,
        kv: SharedKv | DeviceKv | ChosenKv | FollowedKv | None = None,
        states: SharedStates | FollowedStates | None = None,
        *,
        sampling: sampling_pb2.SamplingParams | None = None,
    ) -> None:
        self.sample = Sample()
        """What came of the rounds so far."""
        self._drafter = drafter
        self._sequence = sequence
        self._rejects = sampling is not None and rejects(sampling)
        self._sampled = sampling is not None and sampling.temperature > 0
        self._kv = kv
        self._states = states
        self._received = 0
        self._worker = worker
        self.kv_bytes = sum(each.byte_size for each in (kv, states) if each is not None)
        """Memory of the verifier that is mapped for it. Unit: bytes."""
        self._inline = drafter.inline
        self._last: Drafted | None = None

    @property
    def kv_transport(self) -> str:
        """How it reads the target's KV or hidden states: map, follow, or empty for neither."""
        source = self._kv or self._states
        return "" if source is None else source.transport

    def newly_received(self) -> int:
        """Bytes of KV and hidden states that came over a wire since it was last asked."""
        sources = (self._kv, self._states)
        received = sum(source.received for source in sources if source is not None)
        before, self._received = self._received, received
        return received - before

    @property
    def follows(self) -> Follows:
        """What came of the target's KV over a wire, and what is held of it."""
        kv = self._kv
        return Follows() if kv is None else Follows(kv.updates, kv.received, kv.positions)

    async def warm(self) -> None:
        """Begin with the backlog; inline methods also end with it."""
        if not self._inline:
            self._worker.warm(self._sequence)
            return
        while self._sequence.backlog:
            self._sequence.warm(INLINE_SLICE)
            await asyncio.sleep(0)

    async def round(self, update: Update, budget: Budget) -> Drafted:
        """Take in the update and draft a tree, empty if nodes or time are out."""
        self._judge(update.tokens)
        if budget.nodes > 0:
            await self._await_states(update.committed_length, budget.deadline)
        drafted = await self._draft(update, budget)
        drafted = replace(drafted, tree=self._finished(drafted.tree))
        self._last = drafted if budget.nodes > 0 else None
        return drafted

    def _finished(self, tree: Tree) -> Tree:
        """A tree as it is answered."""
        if self._rejects:
            return tree.best_chain()
        calibration = self._drafter.calibration
        return tree if calibration is None else calibration.apply(tree, sampled=self._sampled)

    async def _await_states(self, committed: int, deadline: float) -> None:
        """Hidden states that are sent come beside the round: wait for those it is about."""
        if self._states is not None:
            left = (deadline - time.monotonic()) / 2
            await self._states.caught_up(committed, max(0.0, min(left, _STATES_SECONDS)))

    def close(self) -> None:
        """Free the sequence, after the round it may still be in."""
        if not self._inline:
            self._worker.close(self._sequence)
            for each in (self._kv, self._states):
                if each is not None:
                    self._worker.post(each.close)
            return
        try:
            self._sequence.close()
        finally:
            for each in (self._kv, self._states):
                if each is not None:
                    each.close()

    async def _draft(self, update: Update, budget: Budget) -> Drafted:
        if not self._inline:
            return await self._worker.submit(self._drafter, self._sequence, update, budget)
        sequence = self._sequence
        begun = time.monotonic()
        sequence.extend(update)
        while sequence.backlog > INLINE_SLICE and time.monotonic() < budget.deadline:
            sequence.warm(INLINE_SLICE)
            await asyncio.sleep(0)
        if budget.nodes <= 0 or time.monotonic() >= budget.deadline:
            return Drafted(EMPTY, 0.0, 0.0)
        (tree,) = self._drafter.draft_many([(sequence, budget)])
        return Drafted(tree, time.monotonic() - begun, 0.0)

    def _judge(self, tokens: Sequence[int]) -> None:
        """What the last tree was worth: how much of the text that followed it held.

        The text does not depend on trees, so this is what acceptance came to, also where the client
        had no time for the tree.
        """
        last, self._last = self._last, None
        if last is None or not tokens:
            return
        self.sample.rounds += 1
        self.sample.accepted += agreement(last.tree, tokens)
        self.sample.draft_seconds += last.draft_seconds


def agreement(tree: Tree, tokens: Sequence[int]) -> int:
    """Length of the longest path of a tree that a text goes on with."""
    depth, reached = 0, {-1}
    for token in tokens:
        reached = {
            node
            for node, parent in enumerate(tree.parents)
            if parent in reached and tree.tokens[node] == token
        }
        if not reached:
            break
        depth += 1
    return depth
