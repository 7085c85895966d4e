"""What the generations of one client have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ._drafter import DrafterHealth
from ._errors import ClientClosedError
from ._model import ModelSource
from ._options import DraftOptions, RetryOptions
from ._taps import TapSource
from ._tokenizer import TokenizerCache
from ._transport import Transport

if TYPE_CHECKING:
    from ._generation import Generation

# Longest wait for caches to be freed when the client closes. Unit: seconds.
_CLOSE_TIMEOUT = 5.0


class Shared:
    """Connection, model, experience with drafters, and the work still under way."""

    def __init__(
        self,
        transport: Transport,
        tokenizers: TokenizerCache,
        retry: RetryOptions,
        drafting: DraftOptions,
        unread_chunks: int,
    ) -> None:
        self.transport = transport
        self.models = ModelSource(transport, tokenizers, retry)
        self.retry = retry
        self.drafting = drafting
        self.unread_chunks = unread_chunks
        self.running: set[Generation] = set()
        self.keepers: set[Generation] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._health: dict[str, DrafterHealth] = {}
        self.taps = TapSource(transport)
        self.closed = False

    def check_open(self) -> None:
        """Raises ClientClosedError after `close`."""
        if self.closed:
            raise ClientClosedError("the client is closed: make a new one")

    def health(self, drafter: str) -> DrafterHealth:
        """The state of a drafter, as far as it is known."""
        return self._health.setdefault(drafter, DrafterHealth(self.drafting))

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs clean-up work that no cancellation of a user's task may stop."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Stops all generations, waits a while for their caches to be freed, disconnects."""
        self.closed = True
        for generation in self.running:
            generation.fail("the client was closed in mid-generation")
        closing = [
            self.in_background(generation.aclose()) for generation in self.running | self.keepers
        ]
        if pending := {*closing, *self._background}:
            await asyncio.wait(pending, timeout=_CLOSE_TIMEOUT)
        await self.transport.close()
