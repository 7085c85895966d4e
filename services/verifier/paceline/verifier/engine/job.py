"""Sequences, jobs that the event loop queues for them, and what a step emits."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.kernels import History
from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.tree import merge as merge_trees
from paceline.verifier.kv.base import HiddenStates, SequenceKv, Taps

if TYPE_CHECKING:
    from paceline.kv.selection import ScoreObserver
    from paceline.verifier.engine.drafting import SequenceAtDrafter
    from paceline.verifier.engine.local import LocalGuesses
    from paceline.verifier.grammar import Grammar
    from paceline.verifier.telemetry import OpenSpans, RoundSpans

NONE = "none"  # the drafter of a generation that wants none

_MEMORY = 0.9  # weight of the earlier trees in the mean of a drafter's expected accepted tokens

# Largest confidence that is used. Calibration raises survivals to a power, which keeps 1 at 1.
_MAX_CONFIDENCE = 0.98


class StepFailed(Exception):
    """A step could not be computed. It committed nothing; the job may be repeated."""


class ConstraintFailed(StepFailed):
    """A text cannot go on within its constraint. The message has no part of the text."""


class SequenceClosed(Exception):
    """The sequence was released while a job of it waited."""


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"  # an end-of-sequence or stop token was emitted
    LENGTH = "length"  # as many tokens as the request allows were emitted, or the context is full


class NoDraft(Enum):
    """Why a step has no drafted tree; see ``paceline.v1.NoDraftReason``."""

    NO_DRAFTER = "no_drafter"
    NODE_BUDGET = "node_budget"
    NOT_READY = "not_ready"
    LATE = "late"
    EMPTY = "empty"
    LAST_TOKEN = "last_token"


class DrafterVersion(NamedTuple):
    """A version of a drafter, as its service announced it."""

    name: str
    version: str
    method: str

    def __str__(self) -> str:
        """NAME@VERSION."""
        return f"{self.name}@{self.version}"


# What drafts where the verifier's own sources do, without a drafter service.
LOCAL = DrafterVersion("local", "1", "local")


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree as it was drafted."""

    tree: TokenTree  # at least one node
    drafter: DrafterVersion
    seconds: float = 0.0  # from its request until it came. Unit: seconds.
    draft_us: int = 0  # time to draft. Unit: microseconds.
    queue_us: int = 0  # wait at the drafter. Unit: microseconds.
    # KV and hidden states that the drafter received over gRPC for it. Unit: bytes.
    kv_bytes: int = 0


@dataclass(slots=True)
class StepOutput:
    """What one engine step emitted for one sequence.

    Acceptance makes it, the engine adds the times of the step, and the service writes it to the
    client.
    """

    tokens: list[int]  # emitted tokens, at least one
    # Indices of the accepted nodes in the drafted tree, from the anchor down. One fewer than
    # `tokens`, unless the last token ended the generation and was drafted too.
    accepted: list[int] = field(default_factory=list)
    finish: FinishReason | None = None  # why the generation ended; None if it has not ended
    # Raw log-probability of each token; empty unless the request has logprobs.
    logprobs: list[float] = field(default_factory=list)
    # Likeliest (token, log-probability) pairs at each position; empty unless the request has
    # top_logprobs.
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    position: int = 0  # output tokens before these
    committed: int = 0  # committed length after the step. Unit: tokens.
    checked: int = 0  # drafted nodes that the step verified
    sources: tuple[str, ...] = ()  # sources of these nodes, as in `TokenTree`; empty: the drafter's
    batch_tokens: int = 0  # tokens in the step, of all sequences
    queue_us: int = 0  # wait for the step. Unit: microseconds.
    step_us: int = 0  # time of the step, acceptance included. Unit: microseconds.
    # Time of a plain step under the same load; 0: not measured. Unit: microseconds.
    plain_us: int = 0
    node_budget: int = 0  # maximum number of nodes to draft next
    draft: Draft | None = None  # the drafted tree; None if there was none
    no_draft: NoDraft | None = None  # why there was none; None after a prefill and with a tree
    # The drafter at which the generation is open; None if it is open at none.
    drafter: DrafterVersion | None = None
    # Failures of drafting since the step before: reason and message.
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    round_began: float = 0.0  # when the step before ended (time.perf_counter)
    began: float = 0.0  # when this one began
    ended: float = 0.0  # when it ended
    spans: OpenSpans | None = None  # spans of its round that were begun; None if there are none
    traced: bool = False  # whether its round is among those that are traced
    steps: int = 1  # number of steps that are merged in it


class Share(NamedTuple):
    """What one source added to the tree of a step."""

    source: str  # name of a local source; empty: the drafter service
    drafted: int  # nodes of the tree that it was the first to propose
    checked: int  # how many of them the step verified
    accepted: int  # how many of these were accepted


def shares(output: StepOutput) -> list[Share]:
    """What each source added to the tree of a step; empty: there was no tree."""
    if output.draft is None:
        return []
    tree = output.draft.tree
    if not tree.sources:
        return [Share("", len(tree), output.checked, len(output.accepted))]
    checked, accepted = Counter(output.sources), Counter(tree.sources[n] for n in output.accepted)
    drafted = Counter(tree.sources).items()
    return [Share(name, count, checked[name], accepted[name]) for name, count in drafted]


def mergeable(first: StepOutput, second: StepOutput) -> bool:
    """Whether two consecutive outputs may be one message: plain, at one drafter, for one reason."""
    plain = first.draft is None and second.draft is None and first.no_draft is second.no_draft
    alike = first.drafter == second.drafter and (first.plain_us > 0) == (second.plain_us > 0)
    return plain and alike and first.spans is None and second.spans is None


def merge(outputs: Sequence[StepOutput]) -> StepOutput:
    """Consecutive outputs that are :func:`mergeable`, at least one, as a single output.

    Tokens are joined and times are added up; committed length, finish reason, node budget and batch
    tokens are those of the last step.
    """
    first, last = outputs[0], outputs[-1]
    if len(outputs) == 1:
        return last
    return replace(
        last,
        tokens=[token for each in outputs for token in each.tokens],
        logprobs=[logprob for each in outputs for logprob in each.logprobs],
        top_logprobs=[top for each in outputs for top in each.top_logprobs],
        position=first.position,
        queue_us=sum(each.queue_us for each in outputs),
        step_us=sum(each.step_us for each in outputs),
        plain_us=sum(each.plain_us for each in outputs),
        fallbacks=[fallback for each in outputs for fallback in each.fallbacks],
        round_began=first.round_began,
        began=first.began,
        traced=any(each.traced for each in outputs),
        steps=len(outputs),
    )


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

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add the output of a step from ``began`` to ``ended`` (time.perf_counter).

        Called on the engine thread. ``output`` is None in the middle of a prefill.
        """
        raise NotImplementedError

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

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add a step; the last one has the first token."""
        if not self.ended:
            self.queue_us = microseconds(began - self.ready_at)
        self.step_us += microseconds(ended - began)
        self.ended = ended
        self.output = output
        self.done = output is not None


@dataclass(eq=False)
class Decode(EngineJob):
    """The steps of one generation, for as long as a Generate stream lasts.

    Between two steps it waits for a step (``queued``), for a tree, or for credits. Only the engine
    thread uses its attributes, but for ``outputs``: it appends on the right, and the event loop
    takes from the left.
    """

    # NAME or NAME@VERSION; empty: the verifier's default; `local`: its own guesses alone; None: no
    # drafter.
    drafter: str | None = None
    always_draft: bool = False  # draft before every step, whatever the scheduler says
    max_nodes: int = 0  # maximum number of drafted nodes; 0: no limit of its own
    # Time after which a step goes on without its tree; None: by the drafter's mean time. Unit:
    # seconds.
    timeout: float | None = None
    isolated: bool = False  # whether the drafter uses no other texts for it, nor it for others
    credits: int = 0  # steps that may still be run
    spans: RoundSpans | None = None  # spans of the next round; None if it is not traced
    # One for each step that the event loop has not taken.
    outputs: deque[StepOutput] = field(default_factory=deque)
    draft: Draft | None = None  # the tree that was drafted for the next step; None if there is none
    # Its nodes to verify, likeliest first, without nodes too deep to be emitted.
    tree: TokenTree = EMPTY
    nodes: tuple[int, ...] = ()  # index in the drafted tree of each node of `tree`
    local: LocalGuesses | None = None  # the verifier's own guesses; None if it makes none
    # Its local tree for the next step, which a drafter's tree is merged with.
    guess: TokenTree = EMPTY
    # Mean expected accepted length of the drafter's recent trees; 0 if there was none.
    expected: float = 0.0
    no_draft: NoDraft = NoDraft.NO_DRAFTER  # why there is no tree
    # Its sequence at a drafter service; None if it is open at none.
    sequence_at_drafter: SequenceAtDrafter | None = None
    # When it may be opened at a drafter again after a failure (time.perf_counter).
    retry_at: float = 0.0
    failures: int = 0  # failures of drafting since the last tree
    # Fallbacks that were not reported: reason and message.
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    # When the step before ended (time.perf_counter).
    round_began: float = field(default_factory=perf_counter)
    # When the event loop was notified of steps (time.perf_counter).
    notified_at: float = float("-inf")

    def set_draft(self, draft: Draft) -> None:
        """Take the tree for the next step, without nodes that the grammar refuses."""
        self.draft = draft
        self.tree, self.nodes = rank(draft.tree, self.sequence.text.room - 1)
        if (guide := self.sequence.guide) is not None:
            with guide.turn() as ready:
                accepted = guide.accepted_nodes(self.tree) if ready else []
            if len(accepted) < len(self.tree):
                self.tree = self.tree.subtree(accepted)
                self.nodes = tuple(self.nodes[node] for node in accepted)

    @property
    def asked(self) -> bool:
        """Whether a drafter service made the tree of the next step, or a part of it."""
        return self.draft is not None and self.draft.drafter != LOCAL

    def drafter_adds(self, local: TokenTree) -> bool:
        """Whether a drafter's tree is expected to be accepted further than a ``local`` one."""
        return not self.expected or sum(local.survivals) < self.expected

    def merge_guess(self, tree: TokenTree, nodes: int) -> TokenTree:
        """A drafter's tree, and the local one, as one tree of at most so many nodes."""
        if not len(tree):
            return tree
        memory = _MEMORY if self.expected else 0.0
        self.expected = memory * self.expected + (1 - memory) * sum(tree.survivals)
        if tree.proposals or not len(self.guess):
            return tree
        return merge_trees(self.guess, tree, nodes=nodes, depth=self.sequence.text.room - 1)

    def add_output(self, output: StepOutput | None, began: float, ended: float) -> None:
        """Add the output of a step, and forget its tree."""
        assert output is not None, "every step of a generation emits"
        draft, fallbacks = self.draft, self.fallbacks
        output.draft = draft
        output.no_draft = None if draft is not None else self.no_draft
        if draft is not None:
            output.drafter = draft.drafter
        elif self.sequence_at_drafter is not None:
            output.drafter = self.sequence_at_drafter.drafter
        elif self.local is not None and self.no_draft is NoDraft.EMPTY:
            output.drafter = LOCAL
        output.fallbacks = fallbacks
        output.began, output.ended, output.round_began = began, ended, self.round_began
        if self.spans is not None:
            output.spans, output.traced = self.spans.take()
        self.draft, self.tree, self.nodes, self.fallbacks = None, EMPTY, (), []
        self.guess = EMPTY
        self.credits -= 1
        self.ready_at = self.round_began = ended
        self.outputs.append(output)
        self.done = output.finish is not None or self.cancelled


def microseconds(seconds: float) -> int:
    """Whole microseconds, never negative."""
    return max(0, round(seconds * 1e6))


def rank(tree: TokenTree, max_depth: int) -> tuple[TokenTree, tuple[int, ...]]:
    """Sort a tree by survival, without nodes below ``max_depth``. Returns it with a confidence for
    each node, and the index in ``tree`` of each node."""
    if not len(tree):
        return tree, ()
    confidences = tree.acceptance_probabilities
    if not tree.confidences or max(confidences) > _MAX_CONFIDENCE:
        confidences = tuple(min(each, _MAX_CONFIDENCE) for each in confidences)
        tree = TokenTree(tree.tokens, tree.parents, confidences, tree.proposals, tree.sources)
    if tree.is_chain:  # survival falls along it
        tree = tree.first(max_depth)
        return tree, tuple(range(len(tree)))
    order = sorted(range(len(tree)), key=tree.survivals.__getitem__, reverse=True)  # stable
    if tree.depth > max_depth:
        order = [node for node in order if tree.depths[node] <= max_depth]
    if order == list(range(len(tree))):
        return tree, tuple(order)
    return tree.subtree(order), tuple(order)


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
        # Name of the drafter that drafts for it; None: none did yet.
        self.drafter: str | None = None
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
        """Positions whose KV can be copied from another sequence. Unit: tokens.

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
        """Append the tokens of a step and make its KV final.

        KV of the accepted path moves up behind the anchor's, over that of rejected nodes.

        Args:
            output: The emitted tokens and the accepted nodes of the verified tree.
            states: As for :meth:`record`.
            row: The anchor's row in them; the tree's nodes follow.
            moved: Whether the KV of the accepted path is where it belongs.
        """
        anchor = len(self.tokens) - 1
        # Node i is row i + 1 of the block. The last token's KV is computed by the next step.
        rows = [node + 1 for node in output.accepted[: len(output.tokens) - 1]]
        in_order = not rows or rows[-1] == len(rows)
        if not (in_order or moved):
            self.kv.compact([anchor + each for each in rows], anchor + 1)
        if anchor >= self.committed:  # not after a prefill, which committed the whole text
            path = [row, *(row + each for each in rows)]
            self.record(anchor, states, slice(row, row + len(path)) if in_order else path)
        output.position = self.text.output_length
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
