"""Runs a verifier beside other services, which are restarted."""

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


class _Restarted:
    """A service that is spawned again, with back-off, at the same address after it died."""

    def __init__(self, process: ServiceProcess) -> None:
        self._process = process
        self._back_off = BackOff(_FIRST_DELAY, _LONGEST_DELAY, _STEADY)
        self._started, self._restart_at = time.monotonic(), 0.0

    def poll(self) -> None:
        """Restart the service if it died and the delay is over."""
        now = time.monotonic()
        if self._process.returncode is None:
            return
        if not self._restart_at:
            delay = self._back_off.delay(now - self._started)
            self._restart_at = now + delay
            logger.warning(
                "the %s died; generations continue without it until it is restarted",
                self._process.kind,
                extra={"code": self._process.returncode, "restart_in_seconds": delay},
            )
        elif now >= self._restart_at:
            self._process.spawn()
            self._started, self._restart_at = now, 0.0


class Supervisor:
    """One verifier, whose end stops everything, and services beside it, which are restarted.

    Args:
        verifier: Not yet started.
        drafter: Not yet started.
        gateway: Called when both answer calls, and their addresses are known; returns a gateway
            that is not yet started, or None.
        on_ready: Called once when all answer calls.
    """

    def __init__(
        self,
        verifier: ServiceProcess,
        drafter: ServiceProcess,
        gateway: Callable[[], ServiceProcess | None],
        on_ready: Callable[[], None],
    ) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._gateway = gateway
        self._on_ready = on_ready
        self._processes: list[ServiceProcess] = []
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
            for process in self._processes:
                process.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        self._start(self._verifier, self._drafter)
        if not self._signals and (gateway := self._gateway()) is not None:
            self._start(gateway)
        if self._signals:
            return self._drain()
        self._on_ready()
        restarted = [_Restarted(process) for process in self._processes[1:]]
        while not self._signals:
            time.sleep(_POLL_INTERVAL)
            if self._verifier.returncode is not None:
                logger.error("the verifier died", extra={"code": self._verifier.returncode})
                return 1
            for service in restarted:
                service.poll()
        return self._drain()

    def _start(self, *processes: ServiceProcess) -> None:
        """Start services side by side and wait until all are ready, or for a signal."""
        for process in processes:
            process.spawn()
            self._processes.append(process)
        while not self._signals and not all(each.poll_ready() for each in self._processes):
            time.sleep(_POLL_INTERVAL)

    def _drain(self) -> int:
        forwarded = 0
        while any(process.returncode is None for process in self._processes):
            while forwarded < len(self._signals):
                for process in self._processes:
                    process.send_signal(signal.SIGTERM)
                forwarded += 1
            time.sleep(_POLL_INTERVAL)
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        # While it loads its model a verifier has no handler: the signal ends it.
        return 0 if self._verifier.returncode in (0, -signal.SIGTERM) else 1
