"""Jobs: work that the event loop queues for the engine, with their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.tree import EMPTY, TokenTree
from paceline.verifier.engine.output import StepOutput

if TYPE_CHECKING:
    from paceline.verifier.engine.sequence import Sequence

_MESSAGE_GAP = 0.010
"""Least time between two notifications of a free run. Unit: seconds.

A notification competes with the next step for the interpreter, and wakes the client's process."""

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
        cancelled: Set by the event loop; the job ends after the running step.
        ready_at: When it started to wait for its next step (time.perf_counter).
        notifies: Whether the event loop is to be notified of the newest step.
        on_done: Called once on the event loop when it is done, after its waiter has run.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.error: Exception | None = None
        self.done = False
        self.cancelled = False
        self.ready_at = perf_counter()
        self.notifies = True
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


class Round(Job):
    """One round of a sequence: the verification of one tree, or a free run of plain steps.

    Attributes:
        number: The client's round_id.
        drafted: Nodes of the tree as it was drafted.
        tree: The tree to verify, most likely nodes first, without nodes too deep to be emitted.
        nodes: Index in the drafted tree of each node of ``tree``.
        steps: Steps still to run.
        deadline: When a free run ends at the latest (time.perf_counter); None: never. A round
            that waited past its deadline still runs one step: its client may repeat the round and
            get the stored answer.
        outputs: One for each step so far. The engine appends, the event loop reads.
    """

    def __init__(
        self,
        sequence: Sequence,
        number: int,
        tree: TokenTree = EMPTY,
        steps: int = 1,
        deadline: float | None = None,
    ) -> None:
        """Make a round of the drafted ``tree``."""
        super().__init__(sequence)
        self.number = number
        self.drafted = len(tree)
        self.tree, self.nodes = rank(tree, sequence.room - 1)
        self.steps = steps
        self.deadline = deadline
        self.outputs: list[StepOutput] = []
        self._notified_at = float("-inf")

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add the output of a step."""
        assert output is not None, "every step of a round emits"
        self.steps -= 1
        self.ready_at = ended
        self.outputs.append(output)
        late = self.deadline is not None and ended >= self.deadline
        self.done = self.steps == 0 or output.finish is not None or self.cancelled or late
        self.notifies = self.done or ended - self._notified_at >= _MESSAGE_GAP
        if self.notifies:
            self._notified_at = ended


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
    order = np.argsort(-tree.survivals, kind="stable").tolist()  # of equal ones, parents first
    nodes = tuple(node for node in order if tree.depths[node] <= max_depth)
    if nodes == tuple(range(len(tree))):
        return tree, nodes
    return tree.subtree(nodes), nodes
