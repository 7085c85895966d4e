"""Positions that a verifier chose of a cache, kept in step by it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from paceline.drafter.kv.errors import KvGone
from paceline.drafter.kv.held import HeldPositions
from paceline.drafter.kv.updates import Update, UpdateStream
from paceline.drafter.kv.wanted import MOST_POSITIONS
from paceline.v1 import kv_pb2

UPDATES_AHEAD = 3
"""Updates kept that no round has taken in yet, one more than the verifier may send; further ones
are not read from the wire."""

Held = TypeVar("Held", bound=HeldPositions)


class Following(UpdateStream, Generic[Held]):
    """What the verifier chose of a cache, for chosen layers.

    The first update of a stream that was opened again replaces what is held.

    :meth:`take_in`, :meth:`check` and :meth:`close` are for one thread at a time. Only what was
    taken in is acknowledged, so that the verifier sends no faster than rounds go.

    Attributes:
        layers: The followed layers as they were asked for, negative ones included.
        updates: Updates taken in so far.
        committed: Committed length that the newest update taken in speaks of. Unit: tokens.
    """

    _kind: type[Held]
    """What updates add up to."""

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        """See :meth:`open`."""
        super().__init__(connect, subscribe)
        self.layers = tuple(subscribe.layers)
        self.updates = self.committed = 0
        self._budget = self._largest_budget = subscribe.budget
        self._pending: deque[Update] = deque()
        self._room_again = asyncio.Event()
        # Of the thread that reads KV:
        self._held: Held | None = None
        self._held_stream = 0

    @property
    def positions(self) -> int:
        """Positions held of each layer."""
        held = self._held
        return 0 if held is None else len(held)

    def take_in(self, below: int, budget: int) -> None:
        """Take in what came meanwhile, unless it speaks of positions at or above ``below``.

        Another budget than before goes to the verifier with the next acknowledgement.

        Raises:
            KvGone: What came makes no sense.
        """
        self._budget = budget or MOST_POSITIONS
        self._largest_budget = max(self._budget, self._largest_budget)
        while self._pending and self._pending[0].committed <= below:
            self._apply(self._pending.popleft())

    def close(self) -> None:
        """End the stream and let go of what is held. Closing twice is safe, on any thread."""
        self._held = None
        super().close()

    def _apply(self, update: Update) -> None:
        try:
            if self._held is None or update.stream != self._held_stream:
                self._held, self._held_stream = self._kind(update.shape), update.stream
            self._held.apply(update.messages, self._largest_budget)
        except KvGone as error:
            self._gone = error
            raise
        self.committed = update.committed
        self.updates += 1
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._acknowledge, update.stream, update.number)

    def _acknowledge(self, stream: int, number: int) -> None:
        self._subscribe.budget = self._budget
        super()._acknowledge(stream, number)
        self._room_again.set()

    def _begin(self) -> None:
        self._subscribe.budget = self._budget

    def _room(self) -> int:
        return self._largest_budget * len(self.layers)

    def _positions(self, message: kv_pb2.FollowCacheResponse) -> int:
        return sum(len(chunk.positions) for chunk in message.chunks)

    async def _arrived(self, update: Update) -> None:
        self._pending.append(update)
        while len(self._pending) >= UPDATES_AHEAD:
            self._room_again.clear()
            await self._room_again.wait()
