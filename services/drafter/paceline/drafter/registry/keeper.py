"""Writes the registry's state behind the event loop's back."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from paceline.drafter.registry.state import RegistryState, StateFile

logger = logging.getLogger("paceline.drafter")


class Keeper:
    """One thread that writes states in the order they came. Belongs to one event loop."""

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafter-state")
        self._last: asyncio.Future[None] | None = None

    def keep(self, state: RegistryState) -> None:
        """Write a state soon. A failure is logged, and raised by :meth:`saved`."""
        loop = asyncio.get_running_loop()
        self._last = loop.run_in_executor(self._thread, self._file.write, state)
        self._last.add_done_callback(_log_failure)

    async def saved(self) -> None:
        """Return when the newest state is on disk.

        Raises:
            OSError: The disk did not take it.
        """
        if self._last is not None:
            await asyncio.shield(self._last)

    async def close(self) -> None:
        """End the thread, after all writes."""
        await asyncio.to_thread(self._thread.shutdown)


def _log_failure(writing: asyncio.Future[None]) -> None:
    if not writing.cancelled() and (error := writing.exception()) is not None:
        logger.error("the registry's state was not saved", extra={"fault": str(error)})
