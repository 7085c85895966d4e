"""Drafter services beside an engine that is not ours and whose steps run on its own thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from paceline.service.exchange import Waiter
from paceline.verifier.engine.drafting import Drafting, ReadTree

_log = logging.getLogger(__name__)


class DraftingLock:
    """Who holds it may use the drafter services: the engine's thread, else the event loop's.

    Commands of the event loop run at once between two steps, and within one as soon as the
    engine's thread looks, which a command wakes.
    """

    def __init__(self, read_tree: ReadTree) -> None:
        """Make it without services; ``read_tree`` checks what they send."""
        self.waiter = Waiter()
        self._drafting = Drafting(self.waiter, read_tree, strict=True)
        self._commands: deque[Callable[[Drafting], None]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[Drafting]:
        with self._lock:
            self.look(0.0)
            yield self._drafting
            self.look(0.0)
        self._run_commands()

    def look(self, seconds: float) -> None:
        """Wait at most so long for messages and commands, and take them. Only who holds it."""
        ready = self.waiter.wait(0.0 if self._drafting.unread or self._commands else seconds)
        while self._commands:
            command = self._commands.popleft()
            try:
                command(self._drafting)
            except Exception:
                _log.exception("a command of the exchange failed")
        self._drafting.read(ready)

    def drafting(self, command: Callable[[Drafting], None]) -> None:
        """Run a command; see :class:`paceline.verifier.rpc.exchange.DraftingThread`."""
        self._commands.append(command)
        self.waiter.wake()
        self._run_commands()

    async def with_drafting(self, command: Callable[[Drafting], None]) -> None:
        """The same; returns when it was run."""
        done: Future[None] = Future()

        def run(drafting: Drafting) -> None:
            try:
                command(drafting)
            finally:
                done.set_result(None)

        self.drafting(run)
        await asyncio.shield(asyncio.wrap_future(done))

    def _run_commands(self) -> None:
        """Run the commands unless somebody holds the lock, who then does."""
        while self._commands and self._lock.acquire(blocking=False):
            try:
                self.look(0.0)
            finally:
                self._lock.release()
