"""What the event loop asks of the engine, and how it gets the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.verifier.engine.acceptance import Finish
from paceline.verifier.engine.tree import NO_TREE, DraftTree

if TYPE_CHECKING:
    from paceline.verifier.engine.sequence import Sequence


# Tokens of a free run come in messages at least this far apart. Telling of each one as it is made
# takes turns with the next step on the same interpreter, and wakes the client's process beside it.
# Unit: seconds.
_MESSAGE_GAP = 0.010


@dataclass(frozen=True, slots=True)
class Emission:
    """What one engine step gave one sequence.

    Attributes:
        tokens: Emitted tokens, at least one.
        accepted: Indices of accepted nodes in the tree as it was drafted.
        logprobs: Raw log-probability of each token; empty unless asked for.
        top_logprobs: Likeliest (token, log-probability) pairs at each position; likewise.
        finish: Why the generation ended, if it did.
        committed: Committed length after the step. Unit: tokens.
        queue_us: Time waited for the step. Unit: microseconds.
        step_us: Time of the step, acceptance included. Unit: microseconds.
        batch_tokens: Tokens in the step, of all sequences.
        checked: Drafted nodes that were in it.
        node_budget: Most nodes worth drafting next.
    """

    tokens: list[int]
    accepted: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish: Finish | None
    committed: int
    queue_us: int
    step_us: int
    batch_tokens: int
    checked: int
    node_budget: int


class Job:
    """Work on one sequence.

    The engine thread writes ``error``, then ``done``, then asks the event loop to ``wake()``; the
    loop only reads. A job that is done never changes again.

    Attributes:
        sequence: Whose work it is.
        error: What went wrong, if something did.
        done: No step will be run for it any more.
        stop: Set by the event loop: the answer is no longer wanted. It ends after the running step.
        ready_at: When it began to wait for its next step (time.perf_counter).
        telling: Whether the event loop should hear of the newest step now.
        on_done: Called once on the event loop when it is done, after who waits for it had its turn.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.error: Exception | None = None
        self.done = False
        self.stop = False
        self.ready_at = perf_counter()
        self.telling = True
        self.on_done: Callable[[], None] | None = None
        self._news = asyncio.Event()

    def take(self, emission: Emission | None, began: float, ended: float) -> None:
        """Note a step that ran from ``began`` to ``ended`` (time.perf_counter). Engine thread."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """End it with an error. Engine thread."""
        self.error = error
        self.done = True

    def wake(self) -> None:
        """Tell the waiting handler that there is news, then whoever listens. Event loop."""
        self._news.set()
        self.sequence.tell_listeners()
        if self.on_done is not None and self.done:
            asyncio.get_running_loop().call_soon(self.on_done)
            self.on_done = None

    async def news(self) -> None:
        """Wait until something happened since the last call. Event loop; one waiter at a time."""
        await self._news.wait()
        self._news.clear()

    async def finished(self) -> None:
        """Wait until it is done. Event loop; one waiter at a time."""
        while not self.done:
            await self.news()


class Prefill(Job):
    """Computes the KV of a text and emits the first token after it.

    Attributes:
        total: Tokens to compute or copy. Unit: tokens.
        reused: Tokens copied from a parent cache. Unit: tokens.
        first: The first token, once done without an error.
        queue_us: Time waited before the first step. Unit: microseconds.
        step_us: Time of all its steps so far. Unit: microseconds.
    """

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(sequence)
        self.total = len(sequence.tokens)
        self.reused = 0
        self.first: Emission | None = None
        self.queue_us = 0
        self.step_us = 0
        self._began = False

    def reuse(self, parent: Sequence) -> None:
        """Copy the KV of the longest common prefix with another sequence. Engine thread.

        Raises:
            OutOfMemory: /dev/shm is full.
        """
        self.reused = self.sequence.common_prefix(parent)
        self.sequence.segment.copy_prefix(parent.segment, self.reused)
        self.sequence.committed = self.reused

    def take(self, emission: Emission | None, began: float, ended: float) -> None:
        """Note a step and, at the end, the first token. Engine thread."""
        if not self._began:
            self.queue_us = microseconds(began - self.ready_at)
            self._began = True
        self.step_us += microseconds(ended - began)
        self.first = emission
        self.done = emission is not None


class Round(Job):
    """One round of a sequence: one tree to check, or a free run of plain steps.

    Attributes:
        number: The client's round_id.
        tree: What was drafted.
        steps: Steps still to run.
        deadline: When a free run ends at the latest (time.perf_counter); None: never. A round
            whose deadline passed while it waited still runs one step: it may be asked for again,
            and its answer is stored.
        emissions: What came out so far; the engine appends, the loop reads.
    """

    def __init__(
        self,
        sequence: Sequence,
        number: int,
        tree: DraftTree = NO_TREE,
        steps: int = 1,
        deadline: float | None = None,
    ) -> None:
        super().__init__(sequence)
        self.number = number
        self.tree = tree
        self.steps = steps
        self.deadline = deadline
        self.emissions: list[Emission] = []
        self._told_at = float("-inf")

    def take(self, emission: Emission | None, began: float, ended: float) -> None:
        """Note the tokens of a step. Engine thread."""
        assert emission is not None, "every step of a round emits"
        self.steps -= 1
        self.ready_at = ended
        self.emissions.append(emission)
        late = self.deadline is not None and ended >= self.deadline
        self.done = self.steps == 0 or emission.finish is not None or self.stop or late
        self.telling = self.done or ended - self._told_at >= _MESSAGE_GAP
        if self.telling:
            self._told_at = ended


def microseconds(seconds: float) -> int:
    """Whole microseconds, never negative."""
    return max(0, round(seconds * 1e6))
