"""Sequences, and jobs that the event loop queues for them."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.kernels import History
from paceline.text import Text
from paceline.verifier.engine.drafted import DraftedText
from paceline.verifier.engine.report import (
    FinishReason,
    StepOutput,
    StepReport,
    StepTimes,
    microseconds,
)
from paceline.verifier.kv.base import HiddenStates, SequenceKv, Taps

if TYPE_CHECKING:
    from paceline.kv.selection import ScoreObserver
    from paceline.verifier.grammar import Grammar, Guide


class StepFailed(Exception):
    """A step could not be computed. It committed nothing; the job may be repeated."""


class ConstraintFailed(StepFailed):
    """A text cannot go on within its constraint. The message has no part of the text."""


class SequenceClosed(Exception):
    """The sequence was released while a job of it waited."""


@dataclass(eq=False)
class EngineJob:
    """Work on one sequence.

    The engine thread writes ``error``, then ``done``, then has the event loop call ``notify()``;
    the event loop only reads. A job that is done never changes again.
    """

    sequence: CachedSequence
    error: Exception | None = None  # why the job failed; None if it did not
    done: bool = False  # whether the engine is finished with it
    cancelled: bool = False  # whether it ends after the running step
    queued: bool = False  # whether it waits for a step
    # When it started to wait for its next step (time.perf_counter).
    ready_at: float = field(default_factory=perf_counter)
    # Chooses the tokens of its last step, once the mask that it waits for is there; None if it
    # waits for none.
    retry: Callable[[], StepOutput | None] | None = None
    # Called once on the event loop when it is done, after its waiter has run.
    on_done: Callable[[], None] | None = None
    _updated: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: Exception) -> None:
        """End with an error. Called on the engine thread."""
        self.error, self.retry = error, None
        self.done = True

    def raise_error(self) -> None:
        """Raise a copy of its error, if it failed: what is raised holds the frames that it leaves,
        and these hold the job. Raises ``Exception`` if it failed."""
        if self.error is not None:
            raise copy(self.error)

    def notify(self) -> None:
        """Wake the waiting handler and the sequence's listeners. Called on the event loop."""
        self._updated.set()
        self.sequence.notify_listeners()
        if self.on_done is not None and self.done:
            asyncio.get_running_loop().call_soon(self.on_done)
            self.on_done = None

    async def updated(self) -> None:
        """Wait for a notification since the last call. One waiter at a time."""
        await self._updated.wait()
        self._updated.clear()

    async def finished(self) -> None:
        """Wait until it is done. One waiter at a time."""
        while not self.done:
            await self.updated()


@dataclass(eq=False)
class Prefill(EngineJob):
    """Computes the KV of a text and emits the first token after it."""

    reused: int = 0  # tokens whose KV came from another cache. Unit: tokens.
    output: StepOutput | None = None  # the first token, once done without an error
    # Raw log-probability of each prompt token but the first, and the likeliest (token,
    # log-probability) pairs at its position; empty unless the request has them.
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    queue_us: int = 0  # wait for the first step. Unit: microseconds.
    step_us: int = 0  # time of all its steps so far. Unit: microseconds.
    ended: float = 0.0  # when its newest step ended (time.perf_counter); 0: none did

    def reuse(self, parent: CachedSequence) -> None:
        """Copy the KV of the max_shared common prefix with another sequence. Engine thread only.

        Does nothing if the prompt's log-probabilities are requested: they are computed with the KV.
        Raises ``OutOfMemory`` if there is no memory.
        """
        if self.sequence.request.prompt_logprobs is not None:
            return
        shared = self.sequence.common_prefix(parent)
        self.sequence.kv.copy_prefix(parent.kv, shared, parent.committed)
        self.sequence.committed = self.reused = shared

    def add(self, output: StepOutput | None, step: StepTimes) -> None:
        """Add a step; the last one has the first token, those before it None."""
        if not self.ended:
            self.queue_us = microseconds(step.began - self.ready_at)
        self.step_us += microseconds(step.ended - step.began)
        self.ended = step.ended
        self.output = output
        self.done = output is not None


class Decode(EngineJob, DraftedText):
    """The steps of one generation, for as long as a Generate stream lasts.

    Between two steps it waits for a step (``queued``), for a tree, or for credits. Only the engine
    thread uses it, but for ``reports``: it appends on the right, and the event loop takes from the
    left.
    """

    def __init__(self, sequence: CachedSequence, *, credits: int = 0, **drafting: Any) -> None:
        """Begin with some credits; ``drafting`` are arguments of :class:`DraftedText`."""
        EngineJob.__init__(self, sequence)
        DraftedText.__init__(self, sequence.text, **drafting)
        self.credits = credits  # steps that may still be run
        self.reports: deque[StepReport] = deque()  # those that the event loop has not taken
        self.notified_at = -math.inf  # when the event loop was notified of steps

    @property
    def guide(self) -> Guide | None:
        return self.sequence.guide

    @property
    def read_grant(self) -> bytes:
        return self.sequence.read_grant

    @property
    def committed(self) -> int:
        return self.sequence.committed

    def add(self, output: StepOutput, step: StepTimes, node_budget: int) -> StepReport:
        """Add a step, after which ``node_budget`` nodes may be drafted; returns its report."""
        queue_us = microseconds(step.began - self.ready_at)
        report = self.report(output, step, queue_us=queue_us, node_budget=node_budget)
        self.credits -= 1
        self.ready_at = step.ended
        self.reports.append(report)
        self.done = output.finish is not None or self.cancelled
        return report


@dataclass(frozen=True)
class Request:
    """A text that a client wants, and what it wants to know of it."""

    text: Text
    # Likeliest tokens to report with each emitted one; None: no log-probabilities.
    top_logprobs: int | None = None
    # The same with each prompt token but the first.
    prompt_logprobs: int | None = None
    taps: Taps | None = None  # hidden states to keep for drafters; None: none
    grammar: Grammar | None = None  # grammar of the output; None: none


class CachedSequence:
    """The state of one generation: its text, its KV, and how far that is final.

    Once prefilled, ``committed == len(tokens) - 1``: the newest token is the anchor, and its KV is
    computed by the next step.

    Thread safety: once the engine has a job of the sequence, only the engine thread changes it or
    its KV. The event loop may read ``committed`` and ``finish`` (each a single assignment)
    then, and everything while the engine has no job of the sequence.
    """

    def __init__(self, request: Request, kv: SequenceKv, owner: str = "") -> None:
        self.request = request
        self.text = request.text
        self.tokens = request.text.tokens  # prompt and output
        self.owner = owner  # the client that made the request, and may use the cache
        self.kv = kv  # its KV; closed by the engine after the sequence is released
        self.released = False  # whether it has ended and runs no more jobs
        prompt_length = request.text.prompt_length
        self.history = History(self.tokens[:prompt_length], self.tokens[prompt_length:])
        grammar = request.grammar
        self.guide = None if grammar is None else grammar.begin()
        self._committed = 0
        # Why the generation ended; None if it has not ended.
        self.finish: FinishReason | None = None
        self.read_grant = b""  # capability that only lets its holder read committed KV
        # Log-probabilities of the emitted tokens, if the request wants them.
        self.logprobs: list[float] = []
        # The likeliest tokens at each emitted token, if the request wants them.
        self.top_logprobs: list[list[tuple[int, float]]] = []
        # Score committed positions while its rounds are verified. The event loop adds and removes
        # them, the engine thread copies the list for each step.
        self.observers: list[ScoreObserver] = []
        # Score committed positions at the end of its prefill.
        self.prompt_observers: list[ScoreObserver] = []
        # Called on the event loop, which owns them, after steps and at the release.
        self.listeners: set[Callable[[], None]] = set()

    def notify_listeners(self) -> None:
        """Call the listeners. Event loop only."""
        for listener in tuple(self.listeners):
            listener()

    @property
    def committed(self) -> int:
        """Positions whose KV is final. Setting it publishes it to other processes. Unit: tokens."""
        return self._committed

    @committed.setter
    def committed(self, tokens: int) -> None:
        self._committed = tokens
        self.kv.publish(tokens)

    @property
    def prefilling(self) -> bool:
        """Whether it has not emitted its first token."""
        return len(self.tokens) == self.text.given

    def common_prefix(self, other: CachedSequence) -> int:
        """Return how many positions' KV can be copied from another sequence. Unit: tokens.

        The last token is left out, since its logits are needed. So are positions whose hidden
        states must be kept but are missing in the other sequence, and those behind the last one
        whose recurrent states it has.
        """
        max_shared = min(other.committed, len(self.tokens) - 1)
        differs = np.not_equal(self.tokens[:max_shared], other.tokens[:max_shared])
        shared = int(differs.argmax()) if differs.any() else max_shared
        taps, states = self.kv.taps, other.kv.states
        if taps is not None:
            shared = taps.reusable(other.kv.taps, other.committed, shared)
        if states is None:
            return shared
        kept = states.reusable(shared)
        if taps is None or kept == shared:
            return kept
        known = taps.reusable(other.kv.taps, other.committed, kept)
        return kept if known == kept else 0

    def record(self, first: int, states: HiddenStates, rows: slice | list[int]) -> None:
        """Keep hidden states of positions about to be committed, if the request has taps and the
        device has not kept them: the given rows, for positions from ``first`` on, of the outputs of
        tapped layers for a whole batch."""
        if self.kv.taps is not None and states:
            self.kv.taps.record(first, states, rows)

    def commit(
        self, output: StepOutput, states: HiddenStates, row: int, *, moved: bool = False
    ) -> None:
        """Append the tokens of a step, and make its KV final: the accepted path's moves up behind
        the anchor's, over rejected nodes', unless it was ``moved`` before. ``states``
        are as for :meth:`record`; ``row`` is the anchor's in them, and the tree's nodes follow."""
        anchor = len(self.tokens) - 1
        # Node i is row i + 1 of the block. The last token's KV is computed by the next step.
        rows = [node + 1 for node in output.accepted[: len(output.tokens) - 1]]
        in_order = not rows or rows[-1] == len(rows)
        if not (in_order or moved):
            self.kv.compact([anchor + offset for offset in rows], anchor + 1)
        if anchor >= self.committed:  # not after a prefill, which committed the whole text
            path = [row, *(row + offset for offset in rows)]
            self.record(anchor, states, slice(row, row + len(path)) if in_order else path)
        self.tokens.extend(output.tokens)
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.finish = output.finish
        self.committed = len(self.tokens) - 1

    def release_grammar(self) -> None:
        """Free its grammar: the text has ended, though its KV may be kept for others."""
        self.guide = None
        self.request = replace(self.request, grammar=None)

    def forget_uncommitted(self) -> None:
        """Take back tokens that entered the history in a step that failed."""
        tokens = len(self.history) - len(self.tokens)
        for _ in range(tokens):
            self.history.pop()
        if self.guide is not None:
            self.guide.pop(tokens)
