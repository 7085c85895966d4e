"""Jobs: work that the event loop queues for the engine, with their results."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.output import Draft, NoDraft, StepOutput

if TYPE_CHECKING:
    from paceline.verifier.engine.drafting import DraftSequence
    from paceline.verifier.engine.sequence import Sequence
    from paceline.verifier.telemetry import RoundSpans

_MAX_CONFIDENCE = 0.98
"""Largest confidence that is used. Calibration raises survivals to a power, which keeps 1 at 1."""


class Job:
    """Work on one sequence.

    The engine thread writes ``error``, then ``done``, then has the event loop call ``notify()``;
    the event loop only reads. A job that is done never changes again.

    Attributes:
        sequence: The sequence.
        error: Why the job failed; None: it did not.
        done: Whether the engine is finished with it.
        cancelled: Whether it ends after the running step.
        queued: Whether it waits for a step.
        ready_at: When it started to wait for its next step (time.perf_counter).
        on_done: Called once on the event loop when it is done, after its waiter has run.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.error: Exception | None = None
        self.done = False
        self.cancelled = False
        self.queued = False
        self.ready_at = perf_counter()
        self.on_done: Callable[[], None] | None = None
        self._updated = asyncio.Event()

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add the output of a step from ``began`` to ``ended`` (time.perf_counter).

        Called on the engine thread. ``output`` is None in the middle of a prefill.
        """
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """End with an error. Called on the engine thread."""
        self.error = error
        self.done = True

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


class Prefill(Job):
    """Computes the KV of a text and emits the first token after it.

    Attributes:
        total: Tokens to compute or copy. Unit: tokens.
        reused: Tokens whose KV came from another cache. Unit: tokens.
        output: The first token, once done without an error.
        prompt_logprobs: Raw log-probability of each prompt token but the first, and the likeliest
            (token, log-probability) pairs at its position; empty unless the request has them.
        queue_us: Wait for the first step. Unit: microseconds.
        step_us: Time of all its steps so far. Unit: microseconds.
    """

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence)
        self.total = len(sequence.tokens)
        self.reused = 0
        self.output: StepOutput | None = None
        self.prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] = []
        self.queue_us = 0
        self.step_us = 0
        self._began = False

    def reuse(self, parent: Sequence) -> None:
        """Copy the KV of the longest common prefix with another sequence. Engine thread only.

        Does nothing if the prompt's log-probabilities are requested: they are computed with the KV.

        Raises:
            OutOfMemory: /dev/shm is full.
        """
        if self.sequence.generation.prompt_logprobs is not None:
            return
        shared = self.sequence.common_prefix(parent)
        self.sequence.segment.copy_prefix(parent.segment, shared)
        self.sequence.committed = self.reused = shared

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add a step; the last one has the first token."""
        if not self._began:
            self.queue_us = microseconds(began - self.ready_at)
            self._began = True
        self.step_us += microseconds(ended - began)
        self.output = output
        self.done = output is not None


class Decode(Job):
    """The steps of one generation, for as long as a Generate stream lasts.

    Between two steps it waits for a step (``queued``), for a tree, or for credits. Only the engine
    thread uses its attributes, but for ``outputs``: it appends on the right, and the event loop
    takes from the left.

    Attributes:
        drafter: NAME or NAME@VERSION; empty: the verifier's default; None: no drafter.
        always_draft: Draft before every step, whatever the scheduler says.
        max_nodes: Maximum number of drafted nodes; 0: no limit of its own.
        timeout: Time after which a step goes on without its tree; None: by the drafter's mean time.
            Unit: seconds.
        credits: Steps that may still be run.
        outputs: One for each step that the event loop has not taken.
        draft: The tree that was drafted for the next step; None: there is none.
        tree: Its nodes to verify, likeliest first, without nodes too deep to be emitted.
        nodes: Index in the drafted tree of each node of ``tree``.
        no_draft: Why there is no tree.
        sequence_at_drafter: Its sequence at a drafter service; None: it is open at none.
        retry_at: When it may be opened at a drafter again after a failure (time.perf_counter).
        failures: Failures of drafting since the last tree.
        fallbacks: Those that were not reported: reason and message.
        spans: Spans of the next round; None: it is not traced.
        round_began: When the step before ended (time.perf_counter).
        notified_at: When the event loop was notified of steps (time.perf_counter).
    """

    def __init__(
        self,
        sequence: Sequence,
        *,
        drafter: str | None = None,
        always_draft: bool = False,
        max_nodes: int = 0,
        timeout: float | None = None,
        credits: int = 0,
        spans: RoundSpans | None = None,
    ) -> None:
        """Make a job; see the attributes."""
        super().__init__(sequence)
        self.drafter = drafter
        self.always_draft = always_draft
        self.max_nodes = max_nodes
        self.timeout = timeout
        self.credits = credits
        self.outputs: deque[StepOutput] = deque()
        self.draft: Draft | None = None
        self.tree: TokenTree = EMPTY
        self.nodes: tuple[int, ...] = ()
        self.no_draft = NoDraft.NO_DRAFTER
        self.sequence_at_drafter: DraftSequence | None = None
        self.retry_at = 0.0
        self.failures = 0
        self.fallbacks: list[tuple[str, str]] = []
        self.spans = spans
        self.round_began = self.ready_at
        self.notified_at = float("-inf")

    def set_draft(self, draft: Draft) -> None:
        """Take the tree for the next step."""
        self.draft = draft
        self.tree, self.nodes = rank(draft.tree, self.sequence.room - 1)

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add the output of a step, and forget its tree."""
        assert output is not None, "every step of a generation emits"
        draft, fallbacks = self.draft, self.fallbacks
        output.draft = draft
        output.no_draft = None if draft is not None else self.no_draft
        output.fallbacks = fallbacks
        output.began, output.ended, output.round_began = began, ended, self.round_began
        if self.spans is not None:
            output.spans = self.spans.take()
        self.draft, self.tree, self.nodes, self.fallbacks = None, EMPTY, (), []
        self.credits -= 1
        self.ready_at = self.round_began = ended
        self.outputs.append(output)
        self.done = output.finish is not None or self.cancelled


def microseconds(seconds: float) -> int:
    """Whole microseconds, never negative."""
    return max(0, round(seconds * 1e6))


def rank(tree: TokenTree, max_depth: int) -> tuple[TokenTree, tuple[int, ...]]:
    """Sort a tree by survival, without nodes below ``max_depth``.

    Returns:
        The tree, with a confidence for each node, and the index in ``tree`` of each node.
    """
    if not len(tree):
        return tree, ()
    confidences = tuple(min(each, _MAX_CONFIDENCE) for each in tree.acceptance_probabilities)
    tree = TokenTree(tree.tokens, tree.parents, confidences, tree.proposals)
    if tree.is_chain:  # survival falls along it
        tree = tree.first(max_depth)
        return tree, tuple(range(len(tree)))
    order = sorted(range(len(tree)), key=lambda node: -tree.survivals[node])  # stable
    nodes = tuple(node for node in order if tree.depths[node] <= max_depth)
    if nodes == tuple(range(len(tree))):
        return tree, nodes
    return tree.subtree(nodes), nodes
