"""One attached stream: where its text stands, and the way of a round to the method and back."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from paceline.drafter.methods.base import Budget, DraftSequence, Update
from paceline.drafter.registry import Version
from paceline.drafter.tree import EMPTY
from paceline.drafter.worker import Drafted, DraftWorker

if TYPE_CHECKING:
    from paceline.drafter.kv.shared import SharedKv

INLINE_SLICE = 32
"""Tokens of backlog that a method may work off on the event loop in one go."""


class Session:
    """A version's sequence for one stream.

    Belongs to the stream's handler, which closes it however the stream ends; nothing may be asked
    of it then. A sequence of an inline method lives on the event loop; all others are handed to the
    worker. The KV that the sequence reads is closed after it, where it was.
    """

    def __init__(
        self,
        version: Version,
        sequence: DraftSequence,
        length: int,
        worker: DraftWorker,
        kv: SharedKv | None = None,
    ) -> None:
        self.version = version
        self.length = length
        """Tokens of the text so far."""
        self._sequence = sequence
        self._kv = kv
        self._worker = worker
        self._inline = version.drafter.inline
        self.kv_bytes = 0 if kv is None else kv.byte_size
        """KV of the verifier that is mapped for it. Unit: bytes."""

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
        self.length += len(update.tokens)
        if not self._inline:
            return await self._worker.submit(self.version.drafter, self._sequence, update, budget)
        sequence = self._sequence
        begun = time.monotonic()
        sequence.extend(update)
        while sequence.backlog > INLINE_SLICE and time.monotonic() < budget.deadline:
            sequence.warm(INLINE_SLICE)
            await asyncio.sleep(0)
        if budget.nodes <= 0 or time.monotonic() >= budget.deadline:
            return Drafted(EMPTY, 0.0, 0.0)
        (tree,) = self.version.drafter.draft_many([(sequence, budget)])
        return Drafted(tree, time.monotonic() - begun, 0.0)

    def close(self) -> None:
        """Free the sequence, after the round it may still be in."""
        if not self._inline:
            self._worker.close(self._sequence)
            if self._kv is not None:
                self._worker.post(self._kv.close)
            return
        try:
            self._sequence.close()
        finally:
            if self._kv is not None:
                self._kv.close()
