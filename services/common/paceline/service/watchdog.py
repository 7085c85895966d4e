"""Ends a service whose GPU hangs: a kernel or driver that never returns cannot be interrupted."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from concurrent.futures import Future
from time import perf_counter

from paceline.device import Device

_log = logging.getLogger(__name__)
EXIT_HUNG = 70  # exit status of a service whose GPU hangs: EX_SOFTWARE of sysexits.h
WATCH_SECONDS = 1.0


class Watchdog:
    """Watches the pieces of work of one thread; on a CPU they may take any time.

    Thread safety: :meth:`begin` and :meth:`end` are called by the thread, :meth:`watch` on the
    event loop.
    """

    def __init__(self, work: str, device: Device) -> None:
        """Watch ``work``, such as "a step", on a device."""
        self._work = f"{work} on {device}"
        self.limit = device.max_seconds
        self._began: float | None = None

    def begin(self) -> None:
        """A piece of work begins."""
        self._began = perf_counter()

    def end(self) -> None:
        """It has ended, or failed."""
        self._began = None

    async def watch(self, fault: Future[None]) -> None:
        """Wait until the service cannot go on, and raise why: ``fault``, which another thread has
        set.

        If work hangs, nothing can be freed any more: the process ends at once.
        """
        waiting = asyncio.wrap_future(fault)
        idle = self.limit == math.inf
        while not waiting.done():
            await asyncio.wait([waiting], timeout=None if idle else WATCH_SECONDS)
            began = self._began
            if began is not None and perf_counter() - began > self.limit:
                _log.critical(
                    "%s has not ended after %g s: the service ends", self._work, self.limit
                )
                logging.shutdown()
                os._exit(EXIT_HUNG)
        waiting.result()
