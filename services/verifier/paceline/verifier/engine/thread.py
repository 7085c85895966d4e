"""A thread that takes commands from an event loop between the steps of its own work."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from paceline.service.exchange import Waiter

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class CommandThread:
    """Runs commands in the order of their submission, when its work calls :meth:`run_commands`.

    Attributes:
        waiter: What the thread waits with. Its work adds sockets.
    """

    def __init__(self, name: str) -> None:
        """Make a thread; :meth:`start` starts it."""
        self.waiter = Waiter()
        self._name = name
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start the thread with ``work``. Callbacks go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        """Queue a command."""
        self._commands.put(command)
        self.waiter.wake()

    async def call(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` as a command, or at once if the thread does not run.

        Raises:
            Exception: ``action`` raised it.
        """
        if self._thread is None:
            return action()
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)

        self.submit(run)
        return await asyncio.shield(asyncio.wrap_future(answer))  # a cancelled caller stops nothing

    async def stop(self, last: Callable[[], None]) -> None:
        """Run ``last``, which has the work return, and join the thread."""
        if self._thread is None:
            return
        self.submit(last)
        await asyncio.to_thread(self._thread.join)
        self._thread = None
        self.run_commands(0.0)

    def run_commands(self, seconds: float | None) -> list[int]:
        """Wait at most ``seconds`` (None: for ever) for commands and sockets; run the commands.

        Returns:
            Descriptors of sockets that are ready.
        """
        ready = self.waiter.wait(seconds)
        while not self._commands.empty():
            try:
                self._commands.get()()
            except Exception:
                _log.exception("engine command failed")
        return ready

    def call_loop(self, callback: Callable[[], None]) -> None:
        """Have the event loop call ``callback``. Any thread may call this."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            _log.debug("the event loop is closed; a callback was dropped")
