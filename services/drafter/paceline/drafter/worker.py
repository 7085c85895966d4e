"""The drafting thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from paceline.device import CPU, Device
from paceline.drafter.kv import KvGone
from paceline.drafter.methods.base import Budget, Drafter, Update
from paceline.drafter.session import Drafted, Session
from paceline.service.exchange import Waiter
from paceline.service.watchdog import Watchdog
from paceline.tree import EMPTY

logger = logging.getLogger("paceline.drafter")

SLICE = 256  # backlog is processed in slices of at most this, between rounds, in tokens
MIN_SLICE = 32
# A slice that takes longer makes the next one shorter: rounds of other texts wait for its end, and
# the steps of a verifier on the same cores take twice as long meanwhile.
SLICE_SECONDS = 0.1

_Result = TypeVar("_Result")


@dataclass(eq=False)
class Job:
    session: Session
    update: Update
    budget: Budget
    arrived: float  # when it came (time.monotonic)
    # Called with the result on the thread, unless the session is closed first.
    answer: Callable[[Drafted | Exception], None]
    extended: bool = False  # whether the session has the update
    worked: float = 0.0  # time spent on it before drafting, in seconds


class DraftWorker:
    """One thread for all drafting, which also reads and writes the sockets of verifiers.

    In each pass it takes what other threads posted and what has come over the sockets, drafts one
    batch for each drafter that has rounds, and then calls what was given to :meth:`flush_later`.
    Rounds come first: a long backlog, such as a prompt to prefill, is processed in slices between
    the rounds of other sequences. An idle thread drafts ahead, level by level: with ``overlap``, or
    by default for a session whose verifier works on other cores.

    Thread safety: any thread may call :meth:`post` and :meth:`stop`, the event loop :meth:`run` and
    :meth:`lost`; everything else is for the thread itself, in functions that were posted. From its
    first use here until it was closed, only the thread touches a session.
    """

    def __init__(self, device: Device = CPU, *, overlap: bool | None = None) -> None:
        """Create a worker of drafters on a device. ``overlap``: whether chains grow on while the
        verifier works; None: if it runs beside the host, or where the verifier works on other
        cores."""
        self._device = device
        self._overlap = True if overlap is None and device.runs_beside else overlap
        self._failed = False
        self._fault: Future[None] = Future()
        self._watchdog = Watchdog("a draft", device)
        self._waiter = Waiter()
        self._calls: deque[Callable[[], None]] = deque()
        # Reentrant, since a finalizer that posts may run anywhere.
        self._lock = threading.RLock()
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._readers: dict[int, Callable[[], None]] = {}
        self._jobs: list[Job] = []
        self._flushes: dict[Callable[[], None], None] = {}
        # Rounds that wait for their backlog, and sessions with a backlog but no round.
        self._prefilling: list[Job] = []
        self._idle: dict[Session, Callable[[], None]] = {}
        self._slice = SLICE
        # Sessions whose tree is being verified.
        self._ahead: dict[Session, None] = {}

    @property
    def waiting(self) -> int:
        """Rounds in the queue. Any thread."""
        return len(self._jobs) + len(self._prefilling)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run a function on the thread, after all that was posted before. Any thread.

        After :meth:`stop` it does nothing.
        """
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                self._waiter.wake()

    async def lost(self) -> None:
        """Wait until the device is lost; if it hangs, the process ends. Event loop. Raises
        ``Exception``: see :meth:`Device.lost <paceline.device.Device.lost>`."""
        await self._watchdog.watch(self._fault)

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Run a function on the thread and wait for its result. Event loop."""
        done: Future[_Result] = Future()
        self.post(partial(settle, done, call))
        return await asyncio.wrap_future(done)

    def stop(self) -> None:
        """End the thread after all posted calls. Queued rounds are dropped. Any thread, once."""
        if self._thread.ident is not None:
            self.post(self._stop)
            self._thread.join()
        with self._lock:
            self._closed = True
            self._waiter.close()

    def add_socket(self, descriptor: int, read: Callable[[], None]) -> None:
        """Call ``read`` whenever a socket can be read, written, or has failed."""
        self._readers[descriptor] = read
        self._waiter.add(descriptor)

    def watch_writable(self, descriptor: int, *, writable: bool) -> None:
        """Wait for a socket to take more bytes too, or no longer."""
        self._waiter.watch_writable(descriptor, writable=writable)

    def remove_socket(self, descriptor: int) -> None:
        del self._readers[descriptor]
        self._waiter.remove(descriptor)

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Call a function once, after the rounds at hand were drafted.

        What a call adds is called after all that was there before.
        """
        self._flushes[flush] = None

    def submit(self, job: Job) -> None:
        """Queue a round: append the update, then draft if the budget has nodes.

        A round whose deadline passes first gets an empty tree. If the method raises, ``answer``
        gets the exception.
        """
        self._jobs.append(job)

    def catch_up(self, session: Session, done: Callable[[], None] = lambda: None) -> None:
        """Process a session's backlog while no round is queued, then call ``done``. It is not
        called if a round comes first, or the session is closed."""
        if session.sequence.backlog > 0:
            self._idle[session] = done
        else:
            done()

    def close(self, session: Session) -> None:
        """Close a session; its open rounds are dropped."""
        self._idle.pop(session, None)
        self._ahead.pop(session, None)
        self._prefilling = [job for job in self._prefilling if job.session is not session]
        self._jobs = [job for job in self._jobs if job.session is not session]
        self._run_logged(session.close)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        self._device.use()
        while not self._stopping:
            self._run_logged(self._pass)
            if self._failed:
                self._failed = False
                self._check_fault()

    def _pass(self) -> None:
        """Wait for work and do it.

        A function of its own: a waiting thread has no local variable that keeps an unloaded
        drafter alive.
        """
        busy = self._prefilling or self._idle or self._ahead
        ready = self._waiter.wait(0 if busy else None)
        self._watchdog.begin()
        try:
            self._work(ready)
        finally:
            self._watchdog.end()

    def _work(self, ready: list[int]) -> None:
        for descriptor in ready:
            read = self._readers.get(descriptor)
            if read is not None:  # else an earlier one of this pass removed it
                self._run_logged(read)
        while self._calls:
            self._run_logged(self._calls.popleft())
        jobs, self._jobs = self._jobs, []
        self._serve(jobs)
        self._flush()
        if self._stopping:
            return
        if self._prefilling:
            self._prefill_slice()
            self._flush()
        elif self._idle:
            self._idle_slice()
            self._flush()
        elif self._ahead and not jobs:
            self._draft_ahead()

    def _flush(self) -> None:
        while self._flushes:
            flushes, self._flushes = self._flushes, {}
            for flush in flushes:
                self._run_logged(flush)

    def _serve(self, jobs: list[Job]) -> None:
        batches: dict[Drafter, list[Job]] = {}
        for job in jobs:
            if self._extend(job):
                batches.setdefault(job.session.drafter, []).append(job)
        for drafter, batch in batches.items():
            self._draft(drafter, batch)

    def _extend(self, job: Job) -> bool:
        """Append the update. Returns whether the round can be drafted now."""
        session = job.session
        self._ahead.pop(session, None)
        self._idle.pop(session, None)
        if not job.extended:
            begun = time.monotonic()
            try:
                session.extend(job.update)
            except Exception as error:
                self._fail(job, error)
                return False
            job.extended = True
            job.worked = time.monotonic() - begun
        if job.budget.nodes <= 0 or time.monotonic() >= job.budget.deadline:
            self.catch_up(session)
            drafted = Drafted(EMPTY, job.worked, time.monotonic() - job.arrived - job.worked)
            job.answer(session.finish(drafted) if job.budget.nodes > 0 else drafted)
            return False
        if session.sequence.backlog > self._slice:
            self._prefilling.append(job)
            return False
        return True

    def _draft(self, drafter: Drafter, jobs: list[Job]) -> None:
        begun = time.monotonic()
        try:
            trees = drafter.draft_many([(job.session.sequence, job.budget) for job in jobs])
            if len(trees) != len(jobs):
                raise ValueError(f"{len(trees)} trees for {len(jobs)} sequences")
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            for job in jobs:  # so that only the faulty one fails
                self._draft(drafter, [job])
            return
        spent = time.monotonic() - begun
        for job, tree in zip(jobs, trees, strict=True):
            if isinstance(tree, KvGone):
                job.answer(tree)
                continue
            if job.session.apart if self._overlap is None else self._overlap:
                self._ahead[job.session] = None
            try:
                waited = begun - job.arrived - job.worked
                result = job.session.finish(Drafted(tree, job.worked + spent, waited))
            except Exception as error:
                self._fail(job, error)
            else:
                job.answer(result)

    def _prefill_slice(self) -> None:
        """Process one slice of the backlog of a waiting round, in round-robin order."""
        now = time.monotonic()
        late = [job for job in self._prefilling if now >= job.budget.deadline]
        self._prefilling = [job for job in self._prefilling if now < job.budget.deadline]
        self._serve(late)
        if not self._prefilling:
            return
        job = self._prefilling.pop(0)
        try:
            job.worked += self._warm(job.session)
        except Exception as error:
            self._fail(job, error)
            return
        self._serve([job])

    def _idle_slice(self) -> None:
        """Process one slice of the backlog of a session without a round. After an error the rest is
        left to its next round, which says what was wrong."""
        session = next(iter(self._idle))
        done = self._idle.pop(session)
        if self._run_logged(lambda: self._warm(session)):
            self.catch_up(session, done)
        else:
            done()

    def _warm(self, session: Session) -> float:
        """Process one slice of a backlog, and return the time that it took. Unit: seconds."""
        begun = time.monotonic()
        session.sequence.warm(self._slice)
        spent = time.monotonic() - begun
        if spent > SLICE_SECONDS:
            self._slice = max(MIN_SLICE, self._slice // 2)
        elif spent < SLICE_SECONDS / 4:
            self._slice = min(SLICE, self._slice * 2)
        return spent

    def _draft_ahead(self) -> None:
        """Draft one level ahead for all sessions of one drafter."""
        drafter = next(iter(self._ahead)).drafter
        ahead = {session.sequence: session for session in self._ahead if session.drafter is drafter}
        going: list[object] = []
        self._run_logged(lambda: going.extend(drafter.draft_ahead(list(ahead))))
        for sequence, session in ahead.items():
            if sequence not in going:
                del self._ahead[session]

    def _fail(self, job: Job, error: Exception) -> None:
        self._failed = True
        job.answer(error)

    def _run_logged(self, call: Callable[[], object]) -> bool:
        """Run a function and log what it raises. Return whether it raised nothing."""
        try:
            call()
        except Exception:
            self._failed = True
            logger.exception("the drafting thread goes on after an error")
            return False
        return True

    def _check_fault(self) -> None:
        self._watchdog.begin()
        fault = self._device.lost()
        self._watchdog.end()
        if fault is not None and not self._fault.done():
            logger.critical("%s: the drafter service ends", fault)
            self._fault.set_exception(fault)


def settle(done: Future[_Result], call: Callable[[], _Result]) -> None:
    """Give a future the result of a call, or what it raised, unless it was cancelled before."""
    waiting = done.set_running_or_notify_cancel()
    try:
        result = call()
    except BaseException as error:
        if waiting:
            done.set_exception(error)
    else:
        if waiting:
            done.set_result(result)
