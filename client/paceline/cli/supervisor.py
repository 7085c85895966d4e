"""Keeps a verifier and a drafter process running, and ends them together."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.cli.processes import ProcessFailed, ServiceProcess

logger = logging.getLogger("paceline.cli")

_POLL_SECONDS = 0.05
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
# A drafter that lived this long died of something new: its back-off starts again.
_STEADY_SECONDS = 60.0


class BackOff:
    """Delays that double from `first` to `longest` seconds, and start again after a steady life."""

    def __init__(self, first: float, longest: float, steady: float) -> None:
        self._first = first
        self._longest = longest
        self._steady = steady
        self._next = first

    def delay(self, lived: float) -> float:
        """Seconds to wait after a life of `lived` seconds."""
        if lived >= self._steady:
            self._next = self._first
        delay = self._next
        self._next = min(2 * delay, self._longest)
        return delay


class Supervisor:
    """One verifier, without which there is no service, and one drafter, which may die and return.

    Args:
        verifier: not yet started; its death ends everything.
        drafter: not yet started; restarted with back-off at the address it had.
        on_ready: called once when both answer calls.
    """

    def __init__(
        self, verifier: ServiceProcess, drafter: ServiceProcess, on_ready: Callable[[], None]
    ) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._on_ready = on_ready
        self._back_off = BackOff(_FIRST_DELAY, _LONGEST_DELAY, _STEADY_SECONDS)
        self._drafter_since = 0.0
        self._drafter_due: float | None = None
        # Signals are only noted where they strike; the loops below act on them.
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until a signal or the verifier's death; the exit code, as of `paceline serve`."""
        with self._noting_signals():
            try:
                code = self._start()
                while code is None and not self._signals:
                    code = self._watch()
                    time.sleep(_POLL_SECONDS)
                return self._drain() if code is None else code
            finally:
                self._verifier.stop()
                self._drafter.stop()

    def _start(self) -> int | None:
        try:
            self._verifier.spawn()
            self._drafter.spawn()
            while not (self._verifier.poll_ready() and self._drafter.poll_ready()):
                if self._signals:
                    return None
                time.sleep(_POLL_SECONDS)
        except ProcessFailed as failure:
            logger.error("cannot serve: %s", failure)
            return 2
        self._drafter_since = time.monotonic()
        self._on_ready()
        return None

    def _watch(self) -> int | None:
        if self._verifier.returncode is not None:
            logger.error("the verifier died", extra={"code": self._verifier.returncode})
            return 1
        if self._drafter.returncode is None:
            return None
        now = time.monotonic()
        if self._drafter_due is None:
            delay = self._back_off.delay(now - self._drafter_since)
            self._drafter_due = now + delay
            logger.warning(
                "the drafter died; generations go on without it until it is back",
                extra={"code": self._drafter.returncode, "restart_in_seconds": delay},
            )
        elif now >= self._drafter_due:
            self._drafter.spawn()
            self._drafter_since = now
            self._drafter_due = None
        return None

    def _drain(self) -> int:
        processes = (self._verifier, self._drafter)
        passed_on = 0
        while any(process.returncode is None for process in processes):
            while passed_on < len(self._signals):
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                passed_on += 1
            time.sleep(_POLL_SECONDS)
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        # A verifier that was still loading its model has no drain: the signal simply ended it.
        return 0 if self._verifier.returncode in (0, -signal.SIGTERM) else 1

    @contextmanager
    def _noting_signals(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
