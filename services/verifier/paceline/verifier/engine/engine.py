"""The thread that owns the device and every write to the KV caches."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from paceline.decoder import Decoder, GraphRunner, use_device
from paceline.kernels import CHUNK, MAX_TREE_NODES
from paceline.verifier.engine.batch import Batch
from paceline.verifier.engine.errors import (
    DeviceLost,
    SequenceClosed,
    StepFailed,
    device_lost,
)
from paceline.verifier.engine.job import Job, Prefill, Round
from paceline.verifier.engine.sequence import Sequence
from paceline.verifier.engine.settle import Outcome, run_batch
from paceline.verifier.engine.tree import DraftTree
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.scheduler.admission import Step
from paceline.verifier.scheduler.scheduler import Decision, Scheduler, Served

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Engine:
    """Runs steps as long as there is work: gather a batch, forward, settle each share, answer.

    All methods but ``_``-private ones belong to the event loop. What they ask for is queued and
    taken up by the thread between two steps, in order: a release asked for after a fork of the
    same sequence cannot overtake it, and no memory goes away under a running step.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        step_tokens: int = 2048,
        prefill_tokens: int = 512,
        threads: int | None = None,
        scheduler: Scheduler | None = None,
        node_budget: int = MAX_TREE_NODES - 1,
        graphs: GraphRunner | None = None,
    ) -> None:
        """Make an engine; ``start()`` starts its thread.

        Args:
            decoder: The model.
            step_tokens: Most tokens of rounds in one step; further rounds wait for the next one.
            prefill_tokens: Most tokens of prompts in one step, so that rounds go on beside a long
                prompt.
            threads: Threads that one operation may use; None leaves torch's own choice.
            scheduler: Cuts trees to what is worth checking; None: all nodes are checked.
            node_budget: Most drafted nodes that a client is told to send.
            graphs: Captured passes of the model, where KV lies in pages.
        """
        self._decoder = decoder
        self._step_tokens = step_tokens
        self._prefill_tokens = prefill_tokens
        self._threads = threads
        self._scheduler = scheduler
        self._node_budget = node_budget
        self._graphs = graphs
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rounds: deque[Round] = deque()
        self._prefills: deque[Prefill] = deque()
        self._news: list[Job] = []
        self._batch: Batch | None = None
        self._stopping = False
        self.on_step: Callable[[float, int, Decision | None], None] | None = None
        """Told of each step: its time in seconds, its tokens, and what became of its trees. Called
        on the engine thread."""
        self._thread: threading.Thread | None = None

    @property
    def device(self) -> torch.device:
        """Where the model runs and the KV lies."""
        return self._decoder.device

    @property
    def in_step(self) -> list[Job]:
        """Jobs that the running step serves; all others wait. Any thread may ask."""
        batch = self._batch
        return [] if batch is None else [share.job for share in batch.shares]

    def start(self) -> None:
        """Start the thread. Its answers go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop after the running step; waiting jobs end with an error. Then the caller may free."""
        if self._thread is None:
            return
        self._commands.put(self._end)
        await asyncio.to_thread(self._thread.join)
        self._thread = None
        self._take_commands()

    async def lost(self) -> None:
        """Wait for the end of the device.

        Raises:
            DeviceLost: It came.
        """
        await asyncio.shield(self._lost)

    def prefill(self, job: Prefill, parent: Sequence | None = None) -> None:
        """Queue a prefill; KV of the longest common prefix with ``parent`` is copied."""
        self._commands.put(partial(self._begin_prefill, job, parent))

    def verify(self, job: Round) -> None:
        """Queue a round."""
        self._commands.put(partial(self._begin_round, job))

    async def release(self, sequence: Sequence) -> None:
        """End the jobs of a sequence and free its memory. Safe to call twice."""
        await self.between_steps(partial(self._close, sequence))

    async def between_steps(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` on the engine thread between two steps."""
        if self._thread is None:
            return action()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()

        def run() -> None:
            try:
                value = action()
            except Exception as error:
                self._tell(partial(_set, answer, answer.set_exception, error))
            else:
                self._tell(partial(_set, answer, answer.set_result, value))

        self._commands.put(run)
        return await answer

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        use_device(self.device)
        with torch.inference_mode():
            while not self._stopping:
                self._take_commands(wait=not (self._rounds or self._prefills))
                self._step()
                self._flush_news()

    def _take_commands(self, *, wait: bool = False) -> None:
        while wait or not self._commands.empty():
            wait = False
            try:
                self._commands.get()()
            except Exception:
                _log.exception("engine command failed")

    def _step(self) -> None:
        began = perf_counter()
        batch = Batch()
        try:
            self._gather_prefills(batch)
            self._gather_rounds(batch)
            if not batch.shares:
                return
            outcomes = self._run_batch(batch)
        except Exception as error:
            _log.exception("step failed", extra={"batch_tokens": len(batch)})
            self._run_one_by_one(batch, error)
            return
        ended = perf_counter()
        decision = self._learn(outcomes, began, ended)
        self._answer_all(outcomes, began, ended, len(batch))
        if self.on_step is not None:
            self.on_step(ended - began, len(batch), decision)

    def _run_batch(self, batch: Batch) -> list[Outcome]:
        self._batch = batch
        try:
            return run_batch(batch, self._decoder, self._graphs)
        finally:
            self._batch = None

    def _run_one_by_one(self, failed: Batch, error: Exception) -> None:
        """Give each job of a failed batch one batch of its own; those that fail there end.

        A step that failed teaches the scheduler nothing.
        """
        for share in failed.shares:
            began = perf_counter()
            try:
                if len(failed.shares) == 1:
                    raise error
                alone = Batch.of(share)
                outcomes = self._run_batch(alone)
            except Exception as own:
                _log.warning("a step failed for one sequence alone: %s", own)
                self._fail(share.job, StepFailed(f"the model could not be run: {own}"))
            else:
                self._answer_all(outcomes, began, perf_counter(), len(alone))
        self._check_device()

    def _answer_all(
        self, outcomes: list[Outcome], began: float, ended: float, batch_tokens: int
    ) -> None:
        for outcome in outcomes:
            self._answer(outcome, began, ended, batch_tokens)
        if any(outcome.error is not None for outcome in outcomes):
            self._check_device()

    def _check_device(self) -> None:
        if device_lost(self.device):
            _log.critical("the device fails every call: the verifier has to be started again")
            lost = DeviceLost(f"{self.device} fails every call since an error in a kernel")
            self._tell(partial(_set, self._lost, self._lost.set_exception, lost))

    def _gather_rounds(self, batch: Batch) -> None:
        rounds: list[Round] = []
        trees: list[DraftTree] = []
        room = self._step_tokens
        for _ in range(len(self._rounds)):
            job = self._rounds.popleft()
            if not self._wanted(job):
                continue
            sequence = job.sequence
            tree = job.tree.up_to_depth(sequence.room - 1)
            if rounds and room < len(tree):
                self._rounds.appendleft(job)
                break
            if self._reserve(job, sequence.committed + len(tree)):
                rounds.append(job)
                trees.append(tree)
                room -= len(tree)
        if rounds:
            trees = self._cut(rounds, trees, batch)
        for job, tree in zip(rounds, trees, strict=True):
            batch.add_round(job, tree)

    def _cut(self, rounds: list[Round], trees: list[DraftTree], batch: Batch) -> list[DraftTree]:
        """The trees without what is not worth its time beside what the batch holds already."""
        if self._scheduler is None:
            return trees
        tokens = len(batch) + len(rounds)
        attended = batch.attended + sum(len(round_.sequence.tokens) for round_ in rounds)
        try:
            return self._scheduler.admit(rounds, trees, Step(tokens, attended, len(rounds)))
        except Exception:  # the rounds have left the queue: none may be lost
            self._drop_scheduler()
            return trees

    def _gather_prefills(self, batch: Batch) -> None:
        left = self._prefill_tokens
        for _ in range(len(self._prefills)):
            if left <= 0:
                return
            job = self._prefills.popleft()
            if not self._wanted(job):
                continue
            start, end = job.sequence.committed, len(job.sequence.tokens)
            share = max(CHUNK, left // (len(self._prefills) + 1))
            stop = min(end, start + min(share, left))
            if self._reserve(job, stop):
                batch.add_prefill(job, stop)
                left -= stop - start

    def _wanted(self, job: Job) -> bool:
        if job.sequence.segment.closed:
            self._fail(job, SequenceClosed("the cache was released"))
        elif job.stop:
            job.done = True
            self._news.append(job)
        return not job.done

    def _reserve(self, job: Job, tokens: int) -> bool:
        try:
            job.sequence.segment.reserve(tokens)
        except OutOfMemory as error:
            self._fail(job, error)
        except OSError as error:
            self._fail(job, StepFailed(f"KV memory could not be reserved: {error}"))
        return not job.done

    def _answer(self, outcome: Outcome, began: float, ended: float, batch_tokens: int) -> None:
        job = outcome.job
        if outcome.error is not None:
            self._fail(job, StepFailed(f"the round could not be settled: {outcome.error}"))
            return
        scheduler, budget = self._scheduler, self._node_budget
        if scheduler is not None:
            budget = scheduler.budget(job.sequence)
            if budget and isinstance(job, Round) and scheduler.suspended(job.sequence):
                job.steps = 1  # the run was asked for because it could not draft: now it can
        job.take(outcome.emission(began, ended, batch_tokens, budget), began, ended)
        if scheduler is not None and job.done and job.sequence.finish is None:
            scheduler.budget_sent(job.sequence, budget)
        if job.telling:
            self._news.append(job)
        if isinstance(job, Prefill) and not job.done:
            self._prefills.append(job)
        elif isinstance(job, Round) and not job.done:
            self._rounds.append(job)

    def _learn(self, outcomes: list[Outcome], began: float, ended: float) -> Decision | None:
        """Tell the scheduler what came of a step; what it had decided."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        try:
            served = [
                Served(outcome.job, outcome.share.tree, outcome.walk)
                for outcome in outcomes
                if isinstance(outcome.job, Round) and outcome.walk is not None
            ]
            decision = scheduler.stepped(began, ended, served)
        except Exception:  # the step's answers must go out
            self._drop_scheduler()
            return None
        return decision

    def _drop_scheduler(self) -> None:
        _log.exception("the scheduler failed; all nodes are checked from now on")
        self._scheduler = None

    def _begin_round(self, job: Round) -> None:
        self._rounds.append(job)

    def _begin_prefill(self, job: Prefill, parent: Sequence | None) -> None:
        try:
            if parent is not None and not parent.segment.closed:
                job.reuse(parent)
        except OutOfMemory as error:
            self._fail(job, error)
            self._flush_news()
            return
        self._prefills.append(job)

    def _close(self, sequence: Sequence) -> None:
        sequence.segment.close()
        if self._scheduler is not None:
            self._scheduler.forget(sequence)
        for job in [*self._rounds, *self._prefills]:
            if job.sequence is sequence:
                self._fail(job, SequenceClosed("the cache was released"))
        self._drop_done()

    def _end(self) -> None:
        self._stopping = True
        for job in [*self._rounds, *self._prefills]:
            self._fail(job, StepFailed("the verifier is stopping"))
        self._drop_done()

    def _drop_done(self) -> None:
        self._rounds = deque(job for job in self._rounds if not job.done)
        self._prefills = deque(job for job in self._prefills if not job.done)
        self._flush_news()

    def _fail(self, job: Job, error: Exception) -> None:
        job.fail(error)
        self._news.append(job)

    def _flush_news(self) -> None:
        if self._news:
            jobs, self._news = self._news, []
            self._tell(partial(_wake, jobs))

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody listens any more
            _log.debug("event loop closed before an answer")


def _wake(jobs: list[Job]) -> None:
    for job in jobs:
        job.wake()


def _set(answer: asyncio.Future[Any], setter: Callable[[Any], None], value: object) -> None:
    if not answer.done():  # otherwise its waiter was cancelled
        setter(value)
