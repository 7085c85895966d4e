"""Requests to stop a process: soft first, hard when repeated."""

import asyncio
import logging
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger("paceline.service")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Two events, `soft` and `hard`, and the signals that set them.

    Args:
        event: used as `soft`; signals are then not handled.
    """

    def __init__(self, event: asyncio.Event | None = None) -> None:
        self.soft = event or asyncio.Event()
        self.hard = asyncio.Event()
        self.signal = 0
        self._owns_signals = event is None and (
            threading.current_thread() is threading.main_thread()
        )

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """In the body the first signal sets `soft`, the second `hard`, and a third one kills."""
        if self._owns_signals:
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            self._restore_signals()

    async def unless(self, event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`, cancelled once `event` is set; returns whether it finished."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
                return True
            return False
        finally:
            waiting.cancel()
            working.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await working

    def _signalled(self, number: int) -> None:
        logger.info("signal", extra={"signal": signal.Signals(number).name})
        if self.soft.is_set():
            self.hard.set()
            self._restore_signals()
        self.soft.set()
        self.signal = number

    def _restore_signals(self) -> None:
        if self._owns_signals:
            self._owns_signals = False
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)
