"""Runs a verifier and a drafter process and restarts the drafter."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from paceline.harness import ProcessFailed, ServiceProcess

logger = logging.getLogger("paceline.cli")

# Unit of all: seconds.
_POLL_INTERVAL = 0.05
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
# After this uptime the back-off starts again.
_STEADY = 60.0


class BackOff:
    """Delays that double from `first` to `longest`, and restart after an uptime of `steady`.

    Unit of all: seconds.
    """

    def __init__(self, first: float, longest: float, steady: float) -> None:
        self._first, self._longest, self._steady = first, longest, steady
        self._next = first

    def delay(self, uptime: float) -> float:
        """The delay after a failure with this uptime."""
        delay = self._first if uptime >= self._steady else self._next
        self._next = min(2 * delay, self._longest)
        return delay


class Supervisor:
    """One verifier, whose end stops everything, and one drafter, which is restarted.

    Args:
        verifier: Not yet started.
        drafter: Not yet started. Restarted with back-off at the same address.
        on_ready: Called once when both answer calls.
    """

    def __init__(
        self, verifier: ServiceProcess, drafter: ServiceProcess, on_ready: Callable[[], None]
    ) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._on_ready = on_ready
        # Signal handlers only append; the loops below react.
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until a signal or the end of the verifier; the exit code of `paceline serve`."""
        numbers = (signal.SIGTERM, signal.SIGINT)

        def record(number: int, _frame: object) -> None:
            self._signals.append(number)

        handlers = {number: signal.signal(number, record) for number in numbers}
        try:
            return self._run()
        except ProcessFailed as failure:
            logger.error("cannot serve: %s", failure)
            return 2
        finally:
            self._verifier.stop()
            self._drafter.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        self._verifier.spawn()
        self._drafter.spawn()
        while not (self._verifier.poll_ready() and self._drafter.poll_ready()):
            if self._signals:
                return self._drain()
            time.sleep(_POLL_INTERVAL)
        self._on_ready()
        back_off = BackOff(_FIRST_DELAY, _LONGEST_DELAY, _STEADY)
        started, restart_at = time.monotonic(), 0.0
        while not self._signals:
            time.sleep(_POLL_INTERVAL)
            now = time.monotonic()
            if self._verifier.returncode is not None:
                logger.error("the verifier died", extra={"code": self._verifier.returncode})
                return 1
            if self._drafter.returncode is None:
                continue
            if not restart_at:
                delay = back_off.delay(now - started)
                restart_at = now + delay
                logger.warning(
                    "the drafter died; generations continue without drafts until it is restarted",
                    extra={"code": self._drafter.returncode, "restart_in_seconds": delay},
                )
            elif now >= restart_at:
                self._drafter.spawn()
                started, restart_at = now, 0.0
        return self._drain()

    def _drain(self) -> int:
        processes = (self._verifier, self._drafter)
        forwarded = 0
        while any(process.returncode is None for process in processes):
            while forwarded < len(self._signals):
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                forwarded += 1
            time.sleep(_POLL_INTERVAL)
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        # While it loads its model a verifier has no handler: the signal ends it.
        return 0 if self._verifier.returncode in (0, -signal.SIGTERM) else 1
