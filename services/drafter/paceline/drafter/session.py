"""A drafter version at work on one generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.drafter.kv import KvExchange, KvNotShared
from paceline.drafter.methods.base import Budget, Drafter, Generation, Update
from paceline.drafter.registry import Version
from paceline.drafter.statistics import DraftStatistics, accepted_length
from paceline.drafter.worker import Drafted, DraftWorker
from paceline.service import ServiceError
from paceline.service.sampling import rejects
from paceline.tree import EMPTY, TokenTree

if TYPE_CHECKING:
    from paceline.drafter.kv.reader import KvReader, StateReader

INLINE_SLICE = 32
"""Tokens of backlog that an inline method processes per turn of the event loop."""

_STATES_SECONDS = 0.25
"""Longest wait of a round for hidden states that are in flight, deadline permitting."""


class Session:
    """A drafter's sequence for one generation, with the KV and hidden states it reads.

    Sequences of inline methods run on the event loop; all others are owned by the worker. The
    creator closes the session once; KV and hidden states are closed after the sequence.

    Trees get calibrated confidences. Under rejection sampling a tree is reduced to its best path,
    and its confidences are left alone: they were not calibrated on sampled tokens.
    """

    def __init__(
        self,
        drafter: Drafter,
        generation: Generation,
        worker: DraftWorker,
        kv: KvReader | None = None,
        states: StateReader | None = None,
    ) -> None:
        """Start a sequence. It reads ``kv`` and ``states``, closed here if it cannot be started."""
        self.statistics = DraftStatistics()
        """Of the rounds so far."""
        self.kv = kv
        self._states = states
        self._sources = [source for source in (kv, states) if source is not None]
        self._drafter = drafter
        self._worker = worker
        self._rejects = rejects(generation.sampling)
        self._sampled = generation.sampling.temperature > 0
        self._received = 0
        self._last: Drafted | None = None
        try:
            self._sequence = drafter.start(replace(generation, kv=kv, states=states))
        except BaseException:
            for source in self._sources:
                source.close()
            raise

    @property
    def mapped_bytes(self) -> int:
        """Memory of the verifier that is mapped for it. Unit: bytes."""
        return sum(source.byte_size for source in self._sources)

    @property
    def kv_transport(self) -> str:
        """How it reads the target's KV or hidden states: map or follow; empty: it reads none."""
        return self._sources[0].transport if self._sources else ""

    def take_received_bytes(self) -> int:
        """Bytes of KV and hidden states received over gRPC since the last call."""
        before = self._received
        self._received = sum(source.received for source in self._sources)
        return self._received - before

    async def catch_up(self) -> None:
        """Process the backlog; on the worker, return at once and process it in the background."""
        if not self._drafter.inline:
            self._worker.catch_up(self._sequence)
            return
        while self._sequence.backlog:
            self._sequence.warm(INLINE_SLICE)
            await asyncio.sleep(0)

    async def draft(self, update: Update, budget: Budget) -> Drafted:
        """Append the update and draft a tree; empty without nodes or after the deadline."""
        self._count_accepted(update.tokens)
        if budget.nodes > 0 and self._states is not None:
            left = (budget.deadline - time.monotonic()) / 2
            seconds = max(0.0, min(left, _STATES_SECONDS))
            await self._states.wait_for(update.committed_length, seconds)
        if self._drafter.inline:
            drafted = await self._draft_inline(update, budget)
        else:
            drafted = await self._worker.submit(self._drafter, self._sequence, update, budget)
        drafted = replace(drafted, tree=self._finish(drafted.tree))
        self._last = drafted if budget.nodes > 0 else None
        return drafted

    def close(self) -> None:
        """Free the sequence, after the round it may still be in."""
        if not self._drafter.inline:
            self._worker.close(self._sequence)
            for source in self._sources:
                self._worker.post(source.close)
            return
        try:
            self._sequence.close()
        finally:
            for source in self._sources:
                source.close()

    async def _draft_inline(self, update: Update, budget: Budget) -> Drafted:
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

    def _finish(self, tree: TokenTree) -> TokenTree:
        if self._rejects:
            return tree.best_chain()
        calibration = self._drafter.calibration
        return tree if calibration is None else calibration.apply(tree, sampled=self._sampled)

    def _count_accepted(self, tokens: Sequence[int]) -> None:
        """Compare the last tree with the tokens after it.

        The text does not depend on the tree, so the result is the accepted length even if the
        client did not wait for the tree.
        """
        last, self._last = self._last, None
        if last is not None and tokens:
            accepted = accepted_length(last.tree, tokens)
            self.statistics += DraftStatistics(1, accepted, last.draft_seconds)


async def open_session(
    version: Version, generation: Generation, worker: DraftWorker, exchange: KvExchange
) -> Session:
    """Open the KV and hidden states that a version reads, and start its sequence.

    Raises:
        ServiceError: KV_NOT_SHARED or HIDDEN_STATES_NOT_SHARED.
    """
    needs, kv, states = version.drafter.needs, None, None
    verifier = generation.verifier_address, generation.read_grant
    source, reason = "KV", "KV_NOT_SHARED"
    try:
        if needs.kv_layers:
            budget = needs.kv_budget_at(len(generation.tokens))
            kv = await exchange.open(*verifier, needs.kv_layers, needs.kv_options, budget)
        source, reason = "hidden states", "HIDDEN_STATES_NOT_SHARED"
        if needs.hidden_state_layers:
            states = await exchange.open_states(
                *verifier,
                needs.hidden_state_layers,
                needs.hidden_state_window,
                needs.hidden_state_transport,
            )
    except BaseException as error:
        if kv is not None:
            kv.close()
        if not isinstance(error, KvNotShared):
            raise
        raise ServiceError.failed_precondition(
            reason,
            f"drafter {version.spec.name!r} reads the target's {source}, but {error}; use a "
            "drafter that needs tokens only",
        ) from error
    return Session(version.drafter, generation, worker, kv, states)
