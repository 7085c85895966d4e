"""The engine's state of one generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.kernels import History, SamplingParams
from paceline.v1 import sampling_pb2
from paceline.verifier.engine.job import FinishReason, StepOutput
from paceline.verifier.kv.base import SequenceKv, Taps

if TYPE_CHECKING:
    from paceline.kv.selection import ScoreObserver
    from paceline.verifier.grammar import Grammar


@dataclass(frozen=True)
class GenerationParams:
    """What a client requested: prompt, sampling parameters and limits.

    Attributes:
        prompt: Token ids of the prompt, at least one.
        output: Tokens emitted before, through a cache that was lost.
        sampling: Sampling parameters.
        length_limit: Maximum length of prompt and output together. Unit: tokens.
        stop_ids: Tokens that end it.
        top_logprobs: Likeliest tokens to report with each emitted one; None: no log-probabilities.
        taps: Hidden states to keep for drafters; None: none.
        grammar: Grammar of the output; None: none.
        prompt_logprobs: Likeliest tokens to report with each prompt token but the first; None: no
            log-probabilities of the prompt.
        sampling_message: The sampling parameters as they were received, for drafters.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    length_limit: int = 1
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    taps: Taps | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    sampling_message: sampling_pb2.SamplingParams | None = None


HiddenStates = Mapping[int, Tensor]
"""Outputs of tapped layers for the rows of a batch, ``[M, hidden]`` each, by layer."""


class Sequence:
    """The state of one generation: its text, its KV, and how far that is final.

    Once prefilled, ``committed == len(tokens) - 1``: the newest token is the anchor, and its KV is
    computed by the next step.

    Thread safety: once the engine has a job of the sequence, only the engine thread changes it or
    its segment. The event loop may read ``committed`` and ``finish`` (each a single assignment)
    then, and everything while the engine has no job of the sequence.

    Attributes:
        generation: The request.
        owner: The client that made the request. Another client's prompt never reuses its KV.
        segment: Its KV; closed by the engine after the sequence is released.
        released: Whether it has ended and runs no more jobs.
        tokens: Prompt and output.
        finish: Why the generation ended; None: it has not ended.
        drafter: Name of the drafter that drafts for it; None: none did yet.
        read_grant: Capability that only lets its holder read committed KV.
        logprobs: Of the tokens that it emitted, and the likeliest pairs, if the request has them.
        observers: Score committed positions while its rounds are verified. The event loop adds and
            removes them, the engine thread copies the list for each step.
        listeners: Called on the event loop, which owns them, after steps and at the release.
    """

    def __init__(self, generation: GenerationParams, segment: SequenceKv, owner: str = "") -> None:
        self.generation = generation
        self.owner = owner
        self.segment = segment
        self.released = False
        self.tokens: list[int] = [*generation.prompt, *generation.output]
        self.history = History(generation.prompt, generation.output)
        grammar = generation.grammar
        self.guide = None if grammar is None else grammar.begin(generation.output)
        self._committed = 0
        self.finish: FinishReason | None = None
        self.drafter: str | None = None
        self.read_grant = b""
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.observers: list[ScoreObserver] = []
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
        self.segment.publish(tokens)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.generation.length_limit - len(self.tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.generation.prompt)

    @property
    def prefilling(self) -> bool:
        """Whether it has not emitted its first token."""
        return len(self.tokens) == len(self.generation.prompt) + len(self.generation.output)

    def common_prefix(self, other: Sequence) -> int:
        """Positions whose KV can be copied from another sequence. Unit: tokens.

        The last token is left out, since its logits are needed. So are positions whose hidden
        states must be kept but are missing in the other sequence.
        """
        longest = min(other.committed, len(self.tokens) - 1)
        pairs = zip(self.tokens[:longest], other.tokens, strict=False)
        shared = next((at for at, (own, theirs) in enumerate(pairs) if own != theirs), longest)
        taps = self.segment.taps
        if taps is None:
            return shared
        return taps.reusable(other.segment.taps, other.committed, shared)

    def record(self, first: int, states: HiddenStates, rows: slice | list[int]) -> None:
        """Keep hidden states of positions about to be committed, if the request has taps.

        Args:
            first: First position.
            states: Outputs of tapped layers for a whole batch, by layer, ``[M, hidden]`` each.
            rows: The rows of these positions, in order.
        """
        if self.segment.taps is not None:
            self.segment.taps.record(first, states, rows)

    def commit(self, output: StepOutput, states: HiddenStates, row: int) -> None:
        """Append the tokens of a step and make its KV final.

        KV of the accepted path moves up behind the anchor's, over that of rejected nodes.

        Args:
            output: The emitted tokens and the accepted nodes of the verified tree.
            states: As for :meth:`record`.
            row: The anchor's row in them; the tree's nodes follow.
        """
        anchor = len(self.tokens) - 1
        # Node i is row i + 1 of the block. The last token's KV is computed by the next step.
        rows = [node + 1 for node in output.accepted[: len(output.tokens) - 1]]
        if rows and rows[-1] != len(rows):
            self.segment.keep([anchor + each for each in rows], anchor + 1)
        if anchor >= self.committed:  # not after a prefill, which committed the whole text
            self.record(anchor, states, [row, *(row + each for each in rows)])
        output.position = self.output_tokens
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.finish = output.finish
        self.committed = len(self.tokens) - 1

    def forget_uncommitted(self) -> None:
        """Take back tokens that entered the history in a step that failed."""
        tokens = len(self.history) - len(self.tokens)
        for _ in range(tokens):
            self.history.pop()
        if self.guide is not None:
            self.guide.pop(tokens)
