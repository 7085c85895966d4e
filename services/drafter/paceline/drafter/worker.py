"""The thread that drafts."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.drafter.methods.base import Budget, Drafter, DraftSequence, Update
from paceline.drafter.tree import EMPTY, Tree

logger = logging.getLogger("paceline.drafter")

SLICE = 256
"""Backlog is worked off in slices of at most this, so that nobody waits longer. Unit: tokens."""


@dataclass(frozen=True)
class Drafted:
    """What came of one round."""

    tree: Tree
    draft_seconds: float
    queue_seconds: float


@dataclass(eq=False)
class Job:
    """One round of one sequence, on its way through the worker."""

    drafter: Drafter
    sequence: DraftSequence
    update: Update
    budget: Budget
    done: asyncio.Future[Drafted]
    queued: float = field(default_factory=time.monotonic)
    taken_in: bool = False
    worked: float = 0.0
    """Seconds spent on it before drafting."""


class DraftWorker:
    """One thread for all drafting, so that rounds that wait together are drafted together.

    Rounds come first. While a sequence has a long backlog (a prompt to prefill), it is worked off
    in slices between the rounds of others, also when no round asks for it. A sequence handed to the
    worker is the thread's alone until it was closed there. Call the methods on the event loop.
    """

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        """Make a worker; ``prepare`` is run on its thread before all else."""
        self._prepare = prepare
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        # Owned by the thread:
        self._behind: list[Job] = []
        self._cold: dict[DraftSequence, None] = {}

    @property
    def waiting(self) -> int:
        """Rounds that wait for the thread. Any thread may ask."""
        return len(self._jobs) + len(self._behind)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(
        self, drafter: Drafter, sequence: DraftSequence, update: Update, budget: Budget
    ) -> asyncio.Future[Drafted]:
        """Ask for a round: take in the update, and draft if ``budget.nodes`` is above 0.

        A round whose deadline passes first gets an empty tree. The future holds the method's
        exception if it raised.
        """
        done: asyncio.Future[Drafted] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._jobs.append(Job(drafter, sequence, update, budget, done))
            self._wake.notify()
        return done

    def warm(self, sequence: DraftSequence) -> None:
        """Work off the sequence's backlog when nothing else is to be done."""
        self.post(lambda: self._mark_cold(sequence))

    def close(self, sequence: DraftSequence) -> None:
        """Close a sequence after everything submitted for it before; its rounds get no answer."""

        def close_now() -> None:
            self._cold.pop(sequence, None)
            self._behind = [job for job in self._behind if job.sequence is not sequence]
            sequence.close()

        self.post(close_now)

    def post(self, call: Callable[[], None]) -> None:
        """Run something on the thread, after all that was submitted or posted until now."""
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after everything posted. Rounds not begun get no answer."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Do what there is to do; False at the end. A function, so that while the thread waits it
        holds on to no drafter: an unloaded one is to be freed."""
        with self._wake:
            while not (self._jobs or self._calls or self._stopping or self._behind or self._cold):
                self._wake.wait()
            jobs, calls = list(self._jobs), deque(self._calls)
            self._jobs.clear()
            self._calls.clear()
            stopping = self._stopping
        self._serve(jobs)
        while calls:
            _guard(calls.popleft())
        if stopping:
            return False
        if self._behind:
            self._warm_behind()
        elif self._cold and not jobs:
            self._warm_idle()
        return True

    def _serve(self, jobs: list[Job]) -> None:
        groups: dict[Drafter, list[Job]] = {}
        for job in jobs:
            if self._take_in(job):
                groups.setdefault(job.drafter, []).append(job)
        for drafter, ready in groups.items():
            self._draft(drafter, ready)

    def _take_in(self, job: Job) -> bool:
        """Pass the update on; whether the round is to be drafted now."""
        if not job.taken_in:
            begun = time.monotonic()
            try:
                job.sequence.extend(job.update)
            except Exception as error:
                _fail(job, error)
                return False
            job.taken_in = True
            job.worked = time.monotonic() - begun
        if job.budget.nodes <= 0 or time.monotonic() >= job.budget.deadline:
            self._mark_cold(job.sequence)
            waited = time.monotonic() - job.queued - job.worked
            _deliver([(job, Drafted(EMPTY, job.worked, waited))])
            return False
        if job.sequence.backlog > SLICE:
            self._behind.append(job)
            return False
        return True

    def _draft(self, drafter: Drafter, jobs: list[Job]) -> None:
        begun = time.monotonic()
        try:
            trees = drafter.draft_many([(job.sequence, job.budget) for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                _fail(jobs[0], error)
                return
            for job in jobs:  # so that only the one at fault fails
                self._draft(drafter, [job])
            return
        spent = time.monotonic() - begun
        _deliver(
            (job, Drafted(tree, job.worked + spent, begun - job.queued - job.worked))
            for job, tree in zip(jobs, trees, strict=True)
        )

    def _warm_behind(self) -> None:
        """One slice of the backlog that keeps a round waiting; rounds take turns."""
        now = time.monotonic()
        late = [job for job in self._behind if now >= job.budget.deadline]
        self._behind = [job for job in self._behind if now < job.budget.deadline]
        self._serve(late)
        if not self._behind:
            return
        job = self._behind.pop(0)
        begun = time.monotonic()
        try:
            job.sequence.warm(SLICE)
        except Exception as error:
            _fail(job, error)
            return
        job.worked += time.monotonic() - begun
        self._serve([job])

    def _warm_idle(self) -> None:
        sequence = next(iter(self._cold))
        del self._cold[sequence]
        if _guard(lambda: sequence.warm(SLICE)):
            self._mark_cold(sequence)

    def _mark_cold(self, sequence: DraftSequence) -> None:
        if sequence.backlog > 0:
            self._cold[sequence] = None


def _deliver(results: Iterable[tuple[Job, Drafted]]) -> None:
    ready = list(results)

    def deliver() -> None:
        for job, drafted in ready:
            if not job.done.done():
                job.done.set_result(drafted)

    _on_loop(ready[0][0], deliver)


def _fail(job: Job, error: Exception) -> None:
    def fail() -> None:
        if not job.done.done():
            job.done.set_exception(error)

    _on_loop(job, fail)


def _on_loop(job: Job, call: Callable[[], None]) -> None:
    try:
        job.done.get_loop().call_soon_threadsafe(call)
    except RuntimeError:
        logger.debug("the event loop closed before a round was answered")


def _guard(call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception:
        logger.exception("a drafter failed between rounds")
        return False
    return True
