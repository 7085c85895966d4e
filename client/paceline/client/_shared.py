"""State shared by the generations of one client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ._errors import ClientClosedError
from ._fleet import Fleet
from ._options import DraftOptions, RetryOptions

if TYPE_CHECKING:
    from ._generation import Generation

# Longest wait for the release of caches when the client closes. Unit: seconds.
_CLOSE_TIMEOUT = 5.0


class Shared:
    """The services, options, and running generations."""

    def __init__(
        self, fleet: Fleet, retry: RetryOptions, drafting: DraftOptions, unread_chunks: int
    ) -> None:
        self.fleet = fleet
        self.retry = retry
        self.drafting = drafting
        self.unread_chunks = unread_chunks
        self.running: set[Generation] = set()
        self.kept: set[Generation] = set()
        self._background: set[asyncio.Task[None]] = set()
        self.closed = False

    def check_open(self) -> None:
        """Raises ClientClosedError after `close`."""
        if self.closed:
            raise ClientClosedError("the client is closed: create a new one")

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine in a task that cancelling a user's task does not cancel."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Stops all generations, waits a while for the release of their caches, disconnects."""
        self.closed = True
        for generation in self.running:
            generation.fail("the client was closed during the generation")
        closing = [
            self.in_background(generation.aclose()) for generation in self.running | self.kept
        ]
        if pending := {*closing, *self._background}:
            await asyncio.wait(pending, timeout=_CLOSE_TIMEOUT)
        await self.fleet.close()
