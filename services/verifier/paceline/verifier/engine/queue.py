"""What waits for the engine: jobs, commands, and the KV of ended texts for new prompts."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from time import perf_counter
from typing import TypeVar

from paceline.kernels import CHUNK
from paceline.prefixes import CHUNK_TOKENS, chunk_keys
from paceline.service.exchange import Waiter
from paceline.verifier.engine.batch import Batch
from paceline.verifier.engine.job import (
    CachedSequence,
    Decode,
    EngineJob,
    Prefill,
    SequenceClosed,
    StepFailed,
)
from paceline.verifier.kv.base import OutOfMemory

# Time of commands between two steps, the last one excepted: a prompt that takes over the KV of a
# long one takes a tenth of a second, and the steps of other texts go on between several.
_COMMAND_SECONDS = 0.01

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class PrefixCache:
    """Finds a sequence of the same user with the longest common prefix, in whole chunks.

    Sequences that run are found once they are prefilled. Those that have ended are kept until
    their memory is needed; the least recently used one goes first. Only the engine thread uses it.
    """

    def __init__(self, max_kept: int) -> None:
        """Make an empty cache that keeps at most ``max_kept`` ended sequences."""
        self._max_kept = max_kept
        self._kept: OrderedDict[CachedSequence, None] = OrderedDict()
        self._found: dict[bytes, dict[CachedSequence, None]] = {}
        self._keys: dict[CachedSequence, list[bytes]] = {}

    def __len__(self) -> int:
        """Return the number of ended sequences that are kept."""
        return len(self._kept)

    def __iter__(self) -> Iterator[CachedSequence]:
        """Return ended sequences, the least recently used one first. Any thread may iterate."""
        return iter(list(self._kept))

    def add(self, sequence: CachedSequence) -> None:
        """Let a sequence be found by its committed text. A second call adds what is new."""
        keys = self._keys.setdefault(sequence, [])
        new = chunk_keys(sequence.tokens[: sequence.committed], sequence.text.owner)[len(keys) :]
        for key in new:
            self._found.setdefault(key, {})[sequence] = None
        keys += new

    def retain(self, sequence: CachedSequence) -> None:
        """Retain a sequence that has ended, instead of those whose text it continues, unless they
        have hidden states that it has not. A text of less than a chunk is closed instead."""
        self.add(sequence)
        keys = self._keys[sequence]
        if not keys:
            self.close(sequence)
            return
        for key in keys:
            for other in list(self._found[key]):
                ends = (
                    other is not sequence and other in self._kept and self._keys[other][-1] == key
                )
                if ends and _layers(other) <= _layers(sequence):
                    self.close(other)
        self._kept[sequence] = None
        while len(self._kept) > self._max_kept:
            self.evict()

    def find(self, sequence: CachedSequence) -> CachedSequence | None:
        """Return a sequence that begins like the prompt of a new one; None if there is none."""
        best: CachedSequence | None = None
        with_states: CachedSequence | None = None
        layers = _layers(sequence)
        for key in chunk_keys(sequence.tokens[:-1], sequence.text.owner):
            sequences = self._found.get(key)
            if not sequences:
                break
            best = next(reversed(sequences))
            if layers:
                able = (other for other in reversed(sequences) if layers <= _layers(other))
                with_states = next(able, with_states)
        if best is not None and with_states is not None:
            best = max(with_states, best, key=sequence.common_prefix)
        if best is not None and best in self._kept:
            self._kept.move_to_end(best)
        return best

    def evict(self) -> bool:
        """Free the memory of the least recently used sequence; return whether there was one."""
        if not self._kept:
            return False
        self.close(next(iter(self._kept)))
        return True

    def close(self, sequence: CachedSequence) -> None:
        """Free the memory of a sequence, which is not found any more."""
        for key in self._keys.pop(sequence, ()):
            sequences = self._found[key]
            del sequences[sequence]
            if not sequences:
                del self._found[key]
        self._kept.pop(sequence, None)
        sequence.kv.close()

    def clear(self) -> None:
        while self.evict():
            pass


def _layers(sequence: CachedSequence) -> set[int]:
    """Return the layers whose hidden states a sequence keeps for drafters."""
    taps = sequence.kv.taps
    return set() if taps is None else {*taps.layout.taps.layers}


class JobQueue:
    """Generations and prefills that wait for a step, in order. Only the engine thread uses it.

    A job that was cancelled, or whose KV cannot grow, ends when it is taken from the queue.
    """

    def __init__(self, step_tokens: int, prefixes: PrefixCache) -> None:
        """Make an empty queue; the arguments are the engine's."""
        self._prefixes = prefixes
        self._step_tokens = step_tokens
        self._decodes: deque[Decode] = deque()
        self.prompts: deque[Prefill] = deque()  # prefills that wait for a step, in order
        # Jobs that ended or have output; the engine notifies their waiters.
        self.updated: list[EngineJob] = []

    @property
    def streams(self) -> int:
        """Generations that wait for a step."""
        return len(self._decodes)

    @property
    def round_tokens(self) -> int:
        """Tokens of the rounds that wait for a step, drafted nodes included."""
        return sum(1 + len(job.tree) for job in self._decodes)

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._decodes) + len(self.prompts)

    def add(self, job: EngineJob) -> None:
        job.queued = True
        if isinstance(job, Decode):
            self._decodes.append(job)
        elif isinstance(job, Prefill):
            self.prompts.append(job)

    def fail(self, job: EngineJob, error: Exception) -> None:
        """End a job that is not in the queue, with an error."""
        job.fail(error)
        self.updated.append(job)

    def fail_all(self, fails: Callable[[EngineJob], bool], error: Exception) -> None:
        """End the waiting jobs for which ``fails`` is true, with an error."""
        for job in [*self._decodes, *self.prompts]:
            if fails(job):
                self.fail(job, error)
        self._decodes = deque(job for job in self._decodes if not job.done)
        self.prompts = deque(job for job in self.prompts if not job.done)

    def take_decodes(self) -> list[Decode]:
        """Take generations, as many as one step has tokens for, and reserve their KV."""
        taken: list[Decode] = []
        left = self._step_tokens
        for _ in range(len(self._decodes)):
            job = self._decodes.popleft()
            tokens = 1 + len(job.tree)
            if self.cancelled(job):
                continue
            if taken and left < tokens:
                job.queued = True
                self._decodes.appendleft(job)
                break
            if self._reserve(job, job.sequence.committed + tokens):
                taken.append(job)
                left -= tokens
        return taken

    def add_prefills(self, batch: Batch, room: int) -> None:
        """Take prefills and add their next parts, which share ``room`` tokens."""
        left = room
        for _ in range(len(self.prompts)):
            if left <= 0:
                return
            job = self.prompts.popleft()
            if self.cancelled(job):
                continue
            start, end = job.sequence.committed, len(job.sequence.tokens)
            share = max(CHUNK, left // (len(self.prompts) + 1))
            stop = min(end, start + min(share, left))
            states = job.sequence.kv.states
            if states is not None:  # other texts continue from the last border of chunks
                border = (end - 1) // CHUNK_TOKENS * CHUNK_TOKENS
                if start < border < stop:
                    stop = border
                elif start == border:
                    states.take_snapshot(border)
            if self._reserve(job, stop):
                batch.add_prefill(job, stop)
                left -= stop - start

    def cancelled(self, job: EngineJob) -> bool:
        """Take a job from the queue; whether it ended without a step. Also of one outside."""
        job.queued = False
        if job.sequence.released or (job.cancelled and isinstance(job, Prefill)):
            self.fail(job, SequenceClosed("the cache was released"))
        elif job.cancelled:
            job.done = True
            self.updated.append(job)
        return job.done

    def _reserve(self, job: EngineJob, tokens: int) -> bool:
        """Reserve KV; where memory is short, ended texts lose theirs."""
        while not job.done:
            try:
                job.sequence.kv.reserve(tokens)
            except OutOfMemory as error:
                if not self._prefixes.evict():
                    self.fail(job, error)
            except OSError as error:
                self.fail(job, StepFailed(f"KV memory could not be reserved: {error}"))
            else:
                break
        return not job.done


class CommandThread:
    """Runs commands in the order of their submission, when its work calls :meth:`run_commands`."""

    def __init__(self) -> None:
        """Make a thread; :meth:`start` starts it."""
        self.waiter = Waiter()  # what the thread waits with. Its work adds sockets.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Callable[[], None], died: Callable[[BaseException], None]) -> None:
        """Start the thread with ``work``; ``died`` is called there with an error that ends it.
        Callbacks go to the running event loop."""
        self._loop = asyncio.get_running_loop()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                _log.critical("the engine ended by an error", exc_info=error)
                died(error)

        self._thread = threading.Thread(target=run, name="paceline-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self.waiter.wake()

    async def call(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` as a command, or at once if the thread does not run. Raises ``Exception``:
        ``action`` raised it."""
        if self._thread is None:
            return action()
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)

        self.submit(run)
        return await asyncio.shield(asyncio.wrap_future(answer))  # a cancelled caller stops nothing

    async def stop(self, last: Callable[[], None]) -> None:
        """Run ``last``, which has the work return, and join the thread."""
        if self._thread is None:
            return
        self.submit(last)
        await asyncio.to_thread(self._thread.join)
        self._thread = None
        while not self._commands.empty():
            self.run_commands(0.0)

    def run_commands(self, seconds: float | None) -> list[int]:
        """Wait at most ``seconds`` (None: for ever) for commands and sockets, and run the commands:
        after :data:`_COMMAND_SECONDS`, the others are left to the next call. Returns the
        descriptors of sockets that are ready."""
        ready = self.waiter.wait(seconds if self._commands.empty() else 0.0)
        begun = perf_counter()
        while not self._commands.empty() and perf_counter() - begun < _COMMAND_SECONDS:
            try:
                self._commands.get()()
            except Exception:
                _log.exception("engine command failed")
        return ready

    def call_loop(self, callback: Callable[[], None]) -> None:
        """Have the event loop call ``callback``. Any thread may call this."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            _log.debug("the event loop is closed; a callback was dropped")
