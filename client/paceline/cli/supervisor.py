"""Services as child processes, which are restarted when they die, until a signal."""

from __future__ import annotations

import logging
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.cli.progress import waiting
from paceline.harness import JOIN_SECONDS, ProcessFailed, ServiceProcess
from paceline.service.phases import phases

logger = logging.getLogger("paceline.cli")

# Unit of all: seconds.
POLL_INTERVAL = 0.05
_FIRST_DELAY = 0.5
_MAX_DELAY = 30.0
_STEADY = 60.0  # after this uptime the back-off starts again

_MAX_UNREADY = 3  # how often a verifier may die in a row before it answers calls


def forwarded(
    signals: Sequence[int], processes: Callable[[], Sequence[ServiceProcess]]
) -> Iterator[None]:
    """Forward signals while a process runs: the first as SIGTERM, and others as SIGINT, since two
    equal ones may come as one. Whoever iterates waits between the steps."""
    count = 0
    while running := [process for process in processes() if process.returncode is None]:
        for _ in signals[count:]:
            for process in running:
                process.send_signal(signal.SIGINT if count else signal.SIGTERM)
            count += 1
        yield


class Restarted:
    """A service that is spawned again, with back-off, at the same address after it died."""

    def __init__(self, process: ServiceProcess) -> None:
        self._process = process
        self._next_delay = _FIRST_DELAY
        self._started, self._restart_at = time.monotonic(), 0.0
        self._unready = 0

    def delay(self, uptime: float) -> float:
        """Return the delay after a failure with this uptime: it doubles. Unit: seconds."""
        delay = _FIRST_DELAY if uptime >= _STEADY else self._next_delay
        self._next_delay = min(2 * delay, _MAX_DELAY)
        return delay

    def poll(self) -> None:
        """Restart the service if it died and the delay is over. Raises ProcessFailed if a verifier
        died `_MAX_UNREADY` times in a row before it answered calls."""
        now, kind = time.monotonic(), self._process.kind
        if self._process.returncode is None:
            return
        if not self._restart_at:
            self._unready = 0 if self._process.was_ready else self._unready + 1
            if kind == "verifier" and self._unready == _MAX_UNREADY:
                times = f"died {_MAX_UNREADY} times in a row before it answered calls"
                raise self._process.failed(f"{times}, with code {self._process.returncode}")
            delay = self.delay(now - self._started)
            self._restart_at = now + delay
            waits = "texts wait" if kind == "verifier" else "generations continue without it"
            logger.warning(
                "the %s died; %s until it is restarted",
                kind,
                waits,
                extra={"code": self._process.returncode, "restart_in_seconds": delay},
            )
        elif now >= self._restart_at:
            self._process.spawn()
            self._started, self._restart_at = now, 0.0


class Supervisor:
    """A verifier and services beside it, not yet started, each of which is restarted when it dies.
    `on_ready` is called once when all answer calls and the drafter, if there is one, has joined."""

    def __init__(
        self,
        processes: Sequence[ServiceProcess],
        joined: Callable[[], bool],
        on_ready: Callable[[], None],
    ) -> None:
        self._verifier = processes[0]
        self._processes = processes
        self._joined = joined
        self._on_ready = on_ready
        # Signal handlers only append; the loops below react.
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until a signal or a failure; the exit code of `paceline serve`."""
        numbers = (signal.SIGTERM, signal.SIGINT)

        def record(number: int, _frame: object) -> None:
            self._signals.append(number)

        handlers = {number: signal.signal(number, record) for number in numbers}
        try:
            if not self._start():
                return self._drain()
            self._on_ready()
            return self._supervise()
        except ProcessFailed as failure:
            # A service that refuses to start has said why.
            said = [process.phase for process in self._processes if process.returncode == 2]
            if not said:
                logger.error("cannot serve: %s", failure)
            phases.on_change("; ".join(said) or str(failure))
            return 2
        finally:
            for process in self._processes:
                process.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self) -> bool:
        """Start all and wait until they answer; False: a signal came. Raises ProcessFailed if one
        does not start."""
        for process in self._processes:
            process.spawn()
        for process in self._processes:
            logger.debug("started: paceline %s", shlex.join((process.kind, *process.arguments)))
        with waiting(self._starting, logger.info):
            while not self._signals:
                ready = [process.poll_ready() for process in self._processes]  # all: any may fail
                if all(ready):
                    break
                time.sleep(POLL_INTERVAL)
            self._wait_joined()
        return not self._signals

    def _starting(self) -> str:
        """Return what does not answer yet, and what it is busy with."""
        pending = [
            f"{process.kind} {process.phase}"
            for process in self._processes
            if not process.was_ready
        ]
        return f"starting: {'; '.join(pending) or 'the drafter joins'}"

    def _supervise(self) -> int:
        """Restart what dies, until a signal, or until the verifier cannot be restarted."""
        restarted = [Restarted(process) for process in self._processes]
        try:
            while not self._signals:
                time.sleep(POLL_INTERVAL)
                for service in restarted:
                    service.poll()
        except ProcessFailed as failure:
            logger.error("cannot go on: %s; the log above says why", failure)
            phases.on_change(str(failure))
            # Twice: texts that wait for the verifier end now, and not with a drain.
            self._signals += [signal.SIGTERM, signal.SIGINT]
            self._drain()
            return 1
        return self._drain()

    def _wait_joined(self) -> None:
        """Wait until the drafter has joined, for a signal or for the end of a service."""
        deadline = time.monotonic() + JOIN_SECONDS
        while not (
            self._signals
            or self._joined()
            or any(process.returncode is not None for process in self._processes)
        ):
            if time.monotonic() > deadline:
                logger.error(
                    "the drafter has not joined the verifier within %g s: generations run without "
                    "drafts until it does; its log above says why",
                    JOIN_SECONDS,
                )
                return
            time.sleep(POLL_INTERVAL)

    def _drain(self) -> int:
        dead = self._verifier.returncode is not None
        for _ in forwarded(self._signals, lambda: self._processes):
            time.sleep(POLL_INTERVAL)
        if len(self._signals) > 1:
            return 128 + self._signals[-1]
        # While it loads its model a verifier has no handler: the signal ends it.
        return 0 if dead or self._verifier.returncode in (0, -signal.SIGTERM) else 1
