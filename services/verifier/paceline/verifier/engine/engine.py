"""The engine: one thread that owns the device and writes all KV caches.

If a step fails, each of its jobs runs again alone. Results do not depend on the batch (on the CPU),
so jobs that succeed return the tokens of the failed step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch

from paceline.decoder import Decoder
from paceline.device import Device, device_of
from paceline.service import limits
from paceline.service.watchdog import Watchdog
from paceline.tree import EMPTY, MAX_NODES, TokenTree
from paceline.verifier.engine.acceptance import accept_batch
from paceline.verifier.engine.batch import Batch, prompt_room
from paceline.verifier.engine.drafting import Drafting, ReadTree
from paceline.verifier.engine.job import (
    CachedSequence,
    Decode,
    EngineJob,
    Prefill,
    SequenceClosed,
    StepFailed,
)
from paceline.verifier.engine.local import LocalGuesses, LocalSources
from paceline.verifier.engine.masks import MaskThread
from paceline.verifier.engine.queue import CommandThread, JobQueue, PrefixCache
from paceline.verifier.engine.report import NoDraft, StepOutput, StepTimes
from paceline.verifier.grammar import Allowance
from paceline.verifier.kv.base import OutOfMemory
from paceline.verifier.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from paceline.cuda.graphs import GraphRunner

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Minimum time between two messages with tokens of a generation. Unit: seconds. A message takes
# about 1 ms of processor time from the steps: the event loop writes it, and the client's process
# wakes up and reads it.
_MESSAGE_GAP = 0.030


class Engine:
    """Runs steps while there is work: schedule a batch, run the model, accept tokens, answer.

    It also owns the rounds: after a step of a generation it requests the next tree or queues the
    next step. A generation whose tree is on its way holds nobody up. Without work the thread sleeps
    until a tree, a command or the earliest timeout.

    The public methods are called on the event loop. They queue commands, which the thread runs in
    order between two steps: a release queued after a fork of the same sequence cannot overtake it,
    and no memory is freed during a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        step_tokens: int = 2048,
        prefill_tokens: int = 512,
        threads: int | None = None,
        scheduler: Scheduler | None = None,
        node_budget: int = MAX_NODES,
        graphs: GraphRunner | None = None,
        max_prefixes: int = 0,
        read_tree: ReadTree | None = None,
        sources: LocalSources | None = None,
    ) -> None:
        """Make an engine; :meth:`start` starts its thread.

        Args:
            decoder: The model.
            step_tokens: Maximum number of tokens of rounds in one step; further rounds wait for the
                next one.
            prefill_tokens: Maximum number of tokens of prompts in one step, so that a long prompt
                does not hold up rounds.
            threads: Threads of one operation; None: PyTorch's setting.
            scheduler: Chooses the nodes of a step; None: all nodes are verified.
            node_budget: Maximum number of drafted nodes in a tree.
            graphs: CUDA graphs of the model, where KV lies in pages.
            max_prefixes: Maximum number of ended texts whose KV is kept for prompts that begin like
                them; 0: no prompt reuses the KV of another one, unless it names its cache.
            read_tree: Reads and checks a drafted tree; None if it is not checked.
            sources: Guesses of generations that name no drafter; None if there are none.
        """
        self._decoder = decoder
        self._threads = threads
        self._scheduler = scheduler
        self._node_budget = node_budget
        self._graphs = graphs
        self._thread = CommandThread()
        self.prefixes = PrefixCache(max_prefixes)
        self._reuses = max_prefixes > 0
        self._prefill_tokens = prefill_tokens
        self._queue = JobQueue(step_tokens, self.prefixes)
        self._drafting = Drafting(
            self._thread.waiter, read_tree or (lambda tree, job: TokenTree.from_proto(tree))
        )
        self._sources = sources
        self._masks = MaskThread(self._thread.submit)
        self._allowance = Allowance()
        self._late: set[EngineJob] = set()  # they wait for masks
        self._step_seconds = 0.0  # of the newest step
        self._decodes: dict[CachedSequence, Decode] = {}
        self._unsent: dict[Decode, float] = {}  # with output, and when to notify the event loop
        self._steps = 0
        self._began = False  # whether the newest step ended a prefill
        self._decided: float | None = None
        self._stopping = False
        self._lost: Future[None] = Future()
        self._watchdog = Watchdog("a step", self.device)
        # Called on the engine thread after each step, with its time, its tokens, and the time of
        # the scheduler's decision on its trees, if it had some. Unit: seconds.
        self.on_step: Callable[[float, int, float | None], None] | None = None

    @property
    def unused_drafters(self) -> list[tuple[str, str]]:
        """Drafters that texts name, or have by default, and that draft in hardly any step, with the
        reason. Any thread may read it."""
        uses = list(self._drafting.uses.items())
        return [(name, why.value) for name, use in uses if (why := use.unused) is not None]

    @property
    def device(self) -> Device:
        """Device of the model and the KV."""
        return device_of(self._decoder.device)

    def start(self) -> None:
        """Start the thread. Jobs notify the running event loop."""
        self._thread.start(self._run, self._died)

    def _died(self, error: BaseException) -> None:
        """The thread has ended by an error: the service ends too, for nothing runs any more."""
        if not self._lost.done():
            self._lost.set_exception(error)

    async def stop(self) -> None:
        """Stop after the running step; waiting jobs fail. Memory may be freed afterwards."""
        await self._thread.stop(self._end)

    async def lost(self) -> None:
        """Wait until the device is lost.

        If a step hangs on a GPU, nothing can be freed any more: the process ends at once. Raises
        ``DeviceLost``: it is.
        """
        await self._watchdog.watch(self._lost)

    def prefill(self, job: Prefill, parent: CachedSequence | None = None) -> None:
        """Queue a prefill; KV of the longest common prefix with ``parent`` is copied.

        Without a parent, the one with the longest common prefix among the owner's other texts.
        """
        self._submit(job, partial(self._begin_prefill, job, parent))

    def decode(self, job: Decode) -> None:
        """Run steps of a generation until it ends, is cancelled or fails."""
        self._submit(job, partial(self._begin_decode, job))

    def grant(self, job: Decode, steps: int) -> None:
        """Allow a generation more steps."""
        self._submit(job, partial(self._grant, job, steps))

    def cancel(self, job: Decode) -> None:
        """End a generation's steps, after the running one. No effect on a job that is done."""
        self._thread.submit(partial(self._cancel, job))

    def drafting(self, command: Callable[[Drafting], None]) -> None:
        """Run a command on the engine's drafter services."""
        self._thread.submit(partial(command, self._drafting))

    async def with_drafting(self, command: Callable[[Drafting], None]) -> None:
        """Run a command on the engine's drafter services; returns when it was run."""
        await self.between_steps(partial(command, self._drafting))

    async def release(self, sequence: CachedSequence) -> None:
        """End the jobs of a sequence, and free its memory or keep it for other prompts.

        A second call does nothing.
        """
        await self.between_steps(partial(self._close, sequence))

    async def between_steps(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` on the engine thread between two steps."""
        return await self._thread.call(action)

    def _submit(self, job: EngineJob, action: Callable[[], None]) -> None:
        """Queue a command; if it fails, its job ends with the error."""

        def run() -> None:
            try:
                action()
            except Exception as error:
                _log.exception("a command of a sequence failed")
                if not job.done:
                    self._queue.fail(job, StepFailed(f"the step could not be prepared: {error}"))
                self._check_device()

        self._thread.submit(run)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self.device.use()
        with torch.inference_mode():
            while not self._stopping:
                self.turn()

    def turn(self) -> None:
        """Run what was queued, and one step; wait where there is nothing to do. The thread repeats
        it; without a started thread, the caller may."""
        self._allowance.left = max(limits.STEP_MASKS_SECONDS, self._step_seconds)
        self._drafting.read(self._thread.run_commands(self._wait_seconds()))
        self._queue_ready()
        self._step()
        self._close_ended()
        self._drafting.flush(self._steps)  # first: drafters work while clients are answered
        if not self.device.runs_beside or not self._queue or self._hold():
            self._notify()  # else while the GPU computes the next step

    def _wait_seconds(self) -> float | None:
        """Return the time with nothing to do; None: until a command or a tree comes."""
        if self._drafting.unread:
            return 0.0
        if self._queue:
            return self._hold()
        times = [*self._drafting.waiting.values(), *self._unsent.values()]
        return max(0.0, min(times) - perf_counter()) if times else None

    def _hold(self) -> float:
        """Return the time that queued jobs wait for trees that come soon. Unit: seconds."""
        ready = len(self._queue)
        if self._scheduler is None or not ready or not self._drafting.waiting:
            return 0.0
        return self._scheduler.hold(ready, self._drafting.arrivals())

    def _step(self) -> None:
        if self._hold():
            return
        began = perf_counter()
        batch = Batch()
        self._decided = None
        try:
            self._schedule(batch)
            if not batch.entries:
                return
            self._steps += 1
            self._watchdog.begin()
            outputs = self._run_batch(batch)
        except Exception as error:
            _log.exception("step failed", extra={"batch_tokens": len(batch)})
            self._run_one_by_one(batch, error)
            return
        finally:
            self._watchdog.end()
        ended = perf_counter()
        self._step_seconds = ended - began
        plain_us = self._learn(batch, outputs, began, ended)
        self._answer(batch.jobs, outputs, StepTimes(began, ended, len(batch), plain_us))
        if self.on_step is not None:
            self.on_step(ended - began, len(batch), self._decided)

    def _schedule(self, batch: Batch) -> None:
        """Fill a batch with prefills, then with generations and the nodes admitted beside them."""
        self._queue.add_prefills(batch, self._prompt_room())
        jobs = self._queue.take_decodes()
        trees = self._admit(jobs, batch) if jobs else []
        for job, tree in zip(jobs, trees, strict=True):
            batch.add_decode(job, tree)

    def _prompt_room(self) -> int:
        """Return the maximum number of tokens of prompts in the next step.

        Texts that run wait for its end, and so does one whose first token the last step chose: its
        client asks for more before long. A step with a long piece of a prompt is too long for them
        by what steps cost. On a GPU no graph runs it, and it costs more than the piece gains: the
        weights are read for their rows too.
        """
        room, rounds = self._prefill_tokens, self._queue.round_tokens
        streams = self._queue.streams + len(self._drafting.waiting)
        if not (streams or self._began) or not self._queue.prompts:
            return room
        if self._scheduler is not None:
            begins = self._queue.prompts[0].sequence.committed
            room = self._scheduler.prompt_tokens(max(1, streams), max(1, rounds), begins, room)
        return room if self._graphs is None else min(room, prompt_room(rounds))

    def _admit(self, jobs: list[Decode], batch: Batch) -> list[TokenTree]:
        """Return the nodes of each tree that are worth their time in this batch."""
        trees = [job.tree for job in jobs]
        if self._scheduler is None:
            return trees
        began, tokens = perf_counter(), len(batch) + len(jobs)
        attended = batch.attended + sum(len(job.sequence.tokens) for job in jobs)
        away = len(self._drafting.waiting)
        try:
            admitted = self._scheduler.admit(jobs, trees, tokens, attended, away)
            for job, tree, kept in zip(jobs, trees, admitted, strict=True):
                if job.local is not None and len(tree) and not job.asked:
                    job.local.admitted(len(tree), len(kept))
            if any(map(len, trees)):
                self._decided = perf_counter() - began
            return admitted
        except Exception:  # the jobs have left the queue: none may be lost
            self._drop_scheduler()
            return trees

    def _run_batch(self, batch: Batch) -> list[StepOutput | None]:
        """Run the model and accept tokens; see :func:`accept_batch`. Raises any error if the model
        could not be run: all sequences are as before."""
        logits, states = batch.forward(self._decoder, self._graphs)
        meanwhile = partial(self._work_meanwhile, batch)
        return accept_batch(batch.entries, logits, states, meanwhile)

    def _work_meanwhile(self, batch: Batch) -> None:
        """Answer clients for the step before, and prepare the next one, while a GPU computes."""
        self._close_ended()
        self._notify()
        if self._graphs is not None:
            batch.prepare_next(self._graphs)

    def _run_one_by_one(self, failed: Batch, error: Exception) -> None:
        """Run each entry of a failed batch in its own batch; those that fail again end.

        The scheduler does not learn from failed steps.
        """
        for entry in failed.entries:
            began = perf_counter()
            try:
                if len(failed.entries) == 1:
                    raise error
                alone = Batch.of(entry)
                outputs = self._run_batch(alone)
            except Exception as failure:
                _log.warning("a step failed for one sequence alone: %s", failure)
                self._queue.fail(entry.job, StepFailed(f"the model could not be run: {failure}"))
            else:
                self._answer(alone.jobs, outputs, StepTimes(began, perf_counter(), len(alone)))
        self._check_device()

    def _answer(
        self, jobs: Sequence[EngineJob], outputs: Sequence[StepOutput | None], step: StepTimes
    ) -> None:
        self._began = False
        for job, output in zip(jobs, outputs, strict=True):
            if job.retry is not None:
                self._late.add(job)
                self._masks.add(job, partial(self._retry, job, step.tokens))
            elif job.error is not None:
                self._queue.updated.append(job)
            elif isinstance(job, Prefill):
                self._answer_prefill(job, output, step)
            elif isinstance(job, Decode) and output is not None:
                self._answer_decode(job, output, step)
        if any(job.error is not None for job in jobs):
            self._check_device()

    def _answer_prefill(self, job: Prefill, output: StepOutput | None, step: StepTimes) -> None:
        job.add(output, step)
        self._queue.updated.append(job)
        if not job.done:
            self._queue.add(job)
            return
        self._began = True
        if self._reuses:
            self.prefixes.add(job.sequence)

    def _answer_decode(self, job: Decode, output: StepOutput, step: StepTimes) -> None:
        budget = self._budget(job)
        self._drafting.note(job, job.add(output, step, budget or 0))
        if job.credits and not job.done:
            self._unsent.setdefault(job, job.notified_at + _MESSAGE_GAP)
        else:
            self._queue.updated.append(job)
        if not job.done:
            self._teach(job, output.tokens)
            self._plan(job, budget)

    def _retry(self, job: EngineJob, batch_tokens: int, error: Exception | None) -> None:
        """Choose the tokens of a job's last step, whose mask was late, or had an error."""
        self._late.discard(job)
        retry, job.retry = job.retry, None
        if job.done or retry is None or self._queue.cancelled(job):
            return
        if error is not None:
            self._queue.fail(job, error)
            return
        began = perf_counter()
        outputs = [retry()]
        self._answer([job], outputs, StepTimes(began, perf_counter(), batch_tokens))

    def _budget(self, job: Decode) -> int | None:
        """Return the maximum number of nodes to draft for the next step.

        0: drafting does not pay; None if there is no drafter.
        """
        name = self._drafting.name_of(job)
        if name is None:
            return None
        job.drafted_by = name
        return self._node_budget if self._scheduler is None else self._scheduler.budget(job)

    def _plan(self, job: Decode, budget: int | None) -> None:
        """Request the next tree of a generation, or queue its next step, if it has credits."""
        if not job.credits:
            return  # until it is granted more
        scheduler, nodes, asked = self._scheduler, budget or 0, False
        if budget == 0 and job.always_draft:
            nodes = self._node_budget
        self._guess(job)
        if budget is None:
            job.no_draft = NoDraft.NO_DRAFTER if job.local is None else NoDraft.EMPTY
        elif nodes and job.text.room <= 1:
            job.no_draft = NoDraft.LAST_TOKEN
        elif nodes and (job.always_draft or scheduler is None or scheduler.asks(job, job.guess)):
            asked = self._drafting.ask(job, nodes, perf_counter())
        else:
            job.no_draft, nodes = NoDraft.NODE_BUDGET, 0
        if scheduler is not None:
            if not asked and job.at_drafter is not None and job.at_drafter.opened is None:
                scheduler.opening(job)
            elif asked or not nodes:
                scheduler.budget_sent(job, nodes)
        if not asked:
            job.use_guess()
            self._queue.add(job)

    def _guess(self, job: Decode) -> None:
        """Make the local tree of a generation's next step, once plain steps were measured."""
        job.guess, least = EMPTY, 0.0
        if job.local is None:
            return
        if self._scheduler is not None and not job.always_draft:
            if not self._scheduler.measured:
                return
            least = self._scheduler.min_survival()
        nodes = min(self._node_budget, job.max_nodes or self._node_budget)
        depth = job.text.room - 1
        tree = self._with_sources(job, lambda local: local.propose(nodes, depth, least)) or EMPTY
        job.guess = tree.best_chain() if job.text.sampling.rejection else tree

    def _teach(self, job: Decode, tokens: Sequence[int]) -> None:
        """Give the local sources of a generation the tokens of a step."""
        self._with_sources(job, lambda local: local.extend(tokens))

    def _with_sources(self, job: Decode, use: Callable[[LocalGuesses], _T]) -> _T | None:
        """Use the local sources of a generation; None if it has none, or they failed, and it goes
        on without them."""
        if job.local is None:
            return None
        try:
            return use(job.local)
        except Exception:
            _log.exception("local sources failed; the text goes on without them")
            job.local = None
            return None

    def _queue_ready(self) -> None:
        """Queue the generations whose wait for a tree is over."""
        drafting = self._drafting
        drafting.expire(perf_counter())
        ready, drafting.ready = drafting.ready, []
        for job in ready:
            assert isinstance(job, Decode), "no other texts are drafted for here"
            job.ready_at = perf_counter()
            job.use_guess()
            self._queue.add(job)

    def _begin_decode(self, job: Decode) -> None:
        if job.sequence.released:
            self._queue.fail(job, SequenceClosed("the cache was released"))
            return
        self._decodes[job.sequence] = job
        if self._sources is not None and job.drafter is not None:
            owner = "" if job.isolated else job.text.owner
            job.local = self._sources.begin(job.text, job.guide, owner)
        self._plan(job, self._budget(job))

    def _grant(self, job: Decode, steps: int) -> None:
        paused = not job.credits and not job.done and self._decodes.get(job.sequence) is job
        job.credits += steps
        if paused and job.credits:
            job.ready_at = job.round_began = perf_counter()
            self._plan(job, self._budget(job))

    def _cancel(self, job: Decode) -> None:
        """End a job that is not queued; the queue ends the others."""
        job.cancelled = True
        if not job.done and not job.queued and job not in self._late:
            job.done = True
            self._queue.updated.append(job)

    def _close_ended(self) -> None:
        """Close the sequences of jobs that ended at their drafters."""
        for job in self._queue.updated:
            if job.done and isinstance(job, Decode):
                self._drafting.close(job)
                if job.local is not None:
                    job.local.close()
                    job.local = None
                if self._decodes.get(job.sequence) is job:
                    del self._decodes[job.sequence]

    def _learn(
        self, batch: Batch, outputs: Sequence[StepOutput | None], began: float, ended: float
    ) -> int:
        """Report a step to the scheduler. Returns the time of a plain step under the same load; 0
        if it was not measured. Unit: microseconds."""
        if self._scheduler is None:
            return 0
        try:
            decodes = [
                output
                for entry, output in zip(batch.entries, outputs, strict=True)
                if isinstance(entry.job, Decode)
            ]
            return self._scheduler.stepped(began, ended, decodes)
        except Exception:  # the step's answers must go out
            self._drop_scheduler()
            return 0

    def _drop_scheduler(self) -> None:
        _log.exception("the scheduler failed; all nodes are verified from now on")
        self._scheduler = None

    def _begin_prefill(self, job: Prefill, parent: CachedSequence | None) -> None:
        if job.sequence.guide is not None:
            job.sequence.guide.allowance = self._allowance
        if parent is None and self._reuses:
            parent = self.prefixes.find(job.sequence)
        while parent is not None and not parent.kv.closed:
            try:
                job.reuse(parent)
                break
            except OutOfMemory as error:
                if not self.prefixes.evict():
                    self._queue.fail(job, error)
                    return
        self._queue.add(job)

    def _close(self, sequence: CachedSequence) -> None:
        if sequence.released:
            return
        sequence.released = True
        sequence.release_grammar()
        if self._reuses and not self._stopping:
            sequence.kv.header.close()  # its readers stop
            self.prefixes.retain(sequence)
        else:
            sequence.kv.close()
        if self._scheduler is not None:
            self._scheduler.forget(sequence.text)
        closed = SequenceClosed("the cache was released")
        self._queue.fail_all(lambda job: job.sequence is sequence, closed)
        for job in (self._decodes.get(sequence), *self._late):
            if job is not None and job.sequence is sequence and not job.done:
                self._queue.fail(job, closed)
        self._close_ended()
        self._notify()

    def _end(self) -> None:
        self._stopping = True
        self.prefixes.clear()
        stopping = StepFailed("the verifier is stopping")
        self._queue.fail_all(lambda job: True, stopping)
        for job in (*self._decodes.values(), *self._late):
            if not job.done:
                self._queue.fail(job, stopping)
        self._close_ended()
        for link in list(self._drafting.links):
            self._drafting.leave(link, "the verifier is stopping")

    def _notify(self) -> None:
        """Have the event loop notify the waiters of jobs that ended, or whose output is due."""
        jobs, self._queue.updated = self._queue.updated, []
        for job in jobs:
            if isinstance(job, Decode):
                self._unsent.pop(job, None)
        if self._unsent:
            now = perf_counter()
            due = [job for job, at in self._unsent.items() if at <= now]
            for job in due:
                del self._unsent[job]
                job.notified_at = now
            jobs += due
        if jobs:
            self._thread.call_loop(partial(_notify_all, jobs))

    def _check_device(self) -> None:
        lost = self.device.lost()
        if lost is not None and not self._lost.done():
            _log.critical("%s: the verifier ends", lost)
            self._lost.set_exception(lost)


def _notify_all(jobs: Sequence[EngineJob]) -> None:
    for job in jobs:
        job.notify()
