"""The drafting thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline.drafter.methods.base import Budget, Drafter, DraftSequence, Update
from paceline.tree import EMPTY, TokenTree

logger = logging.getLogger("paceline.drafter")

SLICE = 256
"""Backlog is processed in slices of at most this, between rounds. Unit: tokens."""


@dataclass(frozen=True)
class Drafted:
    """Result of one round."""

    tree: TokenTree
    draft_seconds: float
    queue_seconds: float


@dataclass(eq=False)
class _Job:
    """One round of one sequence."""

    drafter: Drafter
    sequence: DraftSequence
    update: Update
    budget: Budget
    done: asyncio.Future[Drafted]
    queued: float = field(default_factory=time.monotonic)
    extended: bool = False
    """Whether the sequence has the update."""
    worked: float = 0.0
    """Time spent on it before drafting. Unit: seconds."""

    def finish(self, outcome: Drafted | Exception) -> None:
        """Set the result, on the event loop."""
        if self.done.done():
            return
        if isinstance(outcome, Drafted):
            self.done.set_result(outcome)
        else:
            self.done.set_exception(outcome)


class DraftWorker:
    """One thread for all drafting; it batches the rounds that are queued together.

    Rounds come first. A long backlog, such as a prompt to prefill, is processed in slices between
    the rounds of other sequences. With ``overlap``, an idle thread drafts ahead, level by level.
    From its first use here until it was closed, only the thread touches a sequence. Call the
    methods on the event loop.
    """

    def __init__(self, prepare: Callable[[], None] | None = None, *, overlap: bool = False) -> None:
        """Create a worker; ``prepare`` runs first on its thread."""
        self._prepare = prepare
        self._overlap = overlap
        self._wake = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        # Used by the thread only: rounds that wait for their backlog, and sequences with a backlog
        # but no round.
        self._prefilling: list[_Job] = []
        self._idle: dict[DraftSequence, None] = {}
        # Sequences whose tree is being verified.
        self._ahead: dict[DraftSequence, Drafter] = {}

    @property
    def waiting(self) -> int:
        """Rounds in the queue. Thread-safe."""
        return len(self._jobs) + len(self._prefilling)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(
        self, drafter: Drafter, sequence: DraftSequence, update: Update, budget: Budget
    ) -> asyncio.Future[Drafted]:
        """Queue a round: append the update, then draft if ``budget.nodes`` is above 0.

        A round whose deadline passes first gets an empty tree. If the method raises, the future
        gets the exception.
        """
        done: asyncio.Future[Drafted] = asyncio.get_running_loop().create_future()
        with self._wake:
            self._jobs.append(_Job(drafter, sequence, update, budget, done))
            self._wake.notify()
        return done

    def catch_up(self, sequence: DraftSequence) -> None:
        """Process the sequence's backlog while no round is queued."""
        self.post(lambda: self._mark_idle(sequence))

    def close(self, sequence: DraftSequence) -> None:
        """Close a sequence after all calls made for it before; its open rounds are dropped."""

        def close_now() -> None:
            self._idle.pop(sequence, None)
            self._ahead.pop(sequence, None)
            self._prefilling = [job for job in self._prefilling if job.sequence is not sequence]
            sequence.close()

        self.post(close_now)

    def post(self, call: Callable[[], None]) -> None:
        """Run a function on the thread, after all that was submitted or posted before."""
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after all posted calls. Queued rounds are dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._step():
            pass

    def _step(self) -> bool:
        """Wait for work and do it; False at the end.

        A function of its own: a waiting thread has no local variable that keeps an unloaded
        drafter alive.
        """
        with self._wake:
            while not (
                self._jobs
                or self._calls
                or self._stopping
                or self._prefilling
                or self._idle
                or self._ahead
            ):
                self._wake.wait()
            jobs, calls = list(self._jobs), deque(self._calls)
            self._jobs.clear()
            self._calls.clear()
            stopping = self._stopping
        self._serve(jobs)
        while calls:
            _run_logged(calls.popleft())
        if stopping:
            return False
        if self._prefilling:
            self._prefill_slice()
        elif self._idle and not jobs:
            self._idle_slice()
        elif self._ahead and not jobs:
            self._draft_ahead()
        return True

    def _serve(self, jobs: list[_Job]) -> None:
        batches: dict[Drafter, list[_Job]] = {}
        for job in jobs:
            if self._extend(job):
                batches.setdefault(job.drafter, []).append(job)
        for drafter, batch in batches.items():
            self._draft(drafter, batch)

    def _extend(self, job: _Job) -> bool:
        """Append the update. Returns whether the round can be drafted now."""
        self._ahead.pop(job.sequence, None)
        if not job.extended:
            begun = time.monotonic()
            try:
                job.sequence.extend(job.update)
            except Exception as error:
                _deliver([(job, error)])
                return False
            job.extended = True
            job.worked = time.monotonic() - begun
        if job.budget.nodes <= 0 or time.monotonic() >= job.budget.deadline:
            self._mark_idle(job.sequence)
            waited = time.monotonic() - job.queued - job.worked
            _deliver([(job, Drafted(EMPTY, job.worked, waited))])
            return False
        if job.sequence.backlog > SLICE:
            self._prefilling.append(job)
            return False
        return True

    def _draft(self, drafter: Drafter, jobs: list[_Job]) -> None:
        begun = time.monotonic()
        try:
            trees = drafter.draft_many([(job.sequence, job.budget) for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                _deliver([(jobs[0], error)])
                return
            for job in jobs:  # so that only the faulty one fails
                self._draft(drafter, [job])
            return
        spent = time.monotonic() - begun
        _deliver(
            (job, Drafted(tree, job.worked + spent, begun - job.queued - job.worked))
            for job, tree in zip(jobs, trees, strict=True)
        )
        if self._overlap:
            self._ahead.update((job.sequence, drafter) for job in jobs)

    def _prefill_slice(self) -> None:
        """Process one slice of the backlog of a waiting round, in round-robin order."""
        now = time.monotonic()
        late = [job for job in self._prefilling if now >= job.budget.deadline]
        self._prefilling = [job for job in self._prefilling if now < job.budget.deadline]
        self._serve(late)
        if not self._prefilling:
            return
        job = self._prefilling.pop(0)
        begun = time.monotonic()
        try:
            job.sequence.warm(SLICE)
        except Exception as error:
            _deliver([(job, error)])
            return
        job.worked += time.monotonic() - begun
        self._serve([job])

    def _idle_slice(self) -> None:
        """Process one slice of the backlog of a sequence without a round."""
        sequence = next(iter(self._idle))
        del self._idle[sequence]
        if _run_logged(lambda: sequence.warm(SLICE)):
            self._mark_idle(sequence)

    def _draft_ahead(self) -> None:
        """Draft one level ahead for all sequences of one drafter."""
        drafter = next(iter(self._ahead.values()))
        sequences = [each for each, its in self._ahead.items() if its is drafter]
        going: list[DraftSequence] = []
        _run_logged(lambda: going.extend(drafter.draft_ahead(sequences)))
        for sequence in sequences:
            if sequence not in going:
                del self._ahead[sequence]

    def _mark_idle(self, sequence: DraftSequence) -> None:
        if sequence.backlog > 0:
            self._idle[sequence] = None


def _deliver(outcomes: Iterable[tuple[_Job, Drafted | Exception]]) -> None:
    """Finish jobs on their event loop, in one callback."""
    ready = list(outcomes)

    def finish() -> None:
        for job, outcome in ready:
            job.finish(outcome)

    try:
        ready[0][0].done.get_loop().call_soon_threadsafe(finish)
    except RuntimeError:
        logger.debug("the event loop closed before a round was finished")


def _run_logged(call: Callable[[], None]) -> bool:
    """Run a function and log what it raises. Returns whether it raised nothing."""
    try:
        call()
    except Exception:
        logger.exception("a drafter failed between rounds")
        return False
    return True
