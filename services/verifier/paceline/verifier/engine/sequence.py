"""One generation, as the engine knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.kernels import History, SamplingParams
from paceline.verifier.engine.acceptance import Finish, Walk
from paceline.verifier.kv.base import SequenceKv
from paceline.verifier.kv.taps import Taps

if TYPE_CHECKING:
    from paceline.kv.scores import ScoreObserver
    from paceline.verifier.grammar import Grammar


@dataclass(frozen=True)
class Generation:
    """Everything that decides the tokens of one generation.

    Attributes:
        prompt: Token ids of the prompt, at least one.
        output: Tokens emitted already, by a cache that is gone.
        sampling: Sampling parameters.
        length_limit: Longest text, prompt included. Unit: tokens.
        stop_ids: Tokens that end it.
        grammar: What the output must follow; None: nothing.
        taps: Hidden states to keep for drafters; None: none.
        top_logprobs: Likeliest tokens to report with each emitted one; None: no log-probabilities.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    length_limit: int = 1
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    taps: Taps | None = None
    grammar: Grammar | None = None


States = Mapping[int, Tensor]
"""Outputs of tapped layers for the rows of a batch, ``[M, hidden]`` each, by layer."""


class Sequence:
    """The state of one generation: its text, its KV, and how far that is final.

    Once prefilled, ``committed == len(tokens) - 1``: the newest token is the anchor, and its KV is
    computed by the next step.

    Safety contract: after it was handed to the engine only the engine thread changes it or its
    segment. The event loop may read ``committed`` and ``finish`` (each a single assignment), and
    everything while no job of this sequence is with the engine.

    Attributes:
        generation: What was asked for.
        segment: Its KV; closed by the engine when the sequence is released.
        tokens: Prompt and output.
        finish: Why the generation ended, if it did.
        drafter: Who is to draft for it, as its client calls it; None: nobody, or it was not said.
        observers: Score committed positions while its rounds are verified. The event loop adds and
            removes them, the engine thread takes a copy of the list for each step.
        listeners: Called on the event loop, which owns them, after steps and at the release.
    """

    def __init__(self, generation: Generation, segment: SequenceKv) -> None:
        self.generation = generation
        self.segment = segment
        self.tokens: list[int] = [*generation.prompt, *generation.output]
        self.history = History(generation.prompt, generation.output)
        grammar = generation.grammar
        self.guide = None if grammar is None else grammar.begin(generation.output)
        self._committed = 0
        self.finish: Finish | None = None
        self.drafter: str | None = None
        self.observers: list[ScoreObserver] = []
        self.listeners: set[Callable[[], None]] = set()

    def tell_listeners(self) -> None:
        """Call them all. Event loop."""
        for listener in tuple(self.listeners):
            listener()

    @property
    def committed(self) -> int:
        """Positions whose KV is final. Setting it tells readers in other processes. Unit: tokens"""
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
    def prefilling(self) -> bool:
        """Whether its first token is still to come."""
        return len(self.tokens) == len(self.generation.prompt) + len(self.generation.output)

    def common_prefix(self, other: Sequence) -> int:
        """Positions whose KV can be taken from another sequence. Unit: tokens.

        The last token is left out: its logits are needed. So are positions whose hidden states
        are to be kept and are not there to be taken.
        """
        most = min(other.committed, len(self.tokens) - 1)
        pairs = zip(self.tokens[:most], other.tokens, strict=False)
        shared = next((at for at, (own, theirs) in enumerate(pairs) if own != theirs), most)
        taps = self.segment.taps
        if taps is None:
            return shared
        return taps.reusable(other.segment.taps, other.committed, shared)

    def record(self, first: int, states: States, rows: slice | list[int]) -> None:
        """Keep hidden states of positions about to be committed, if any are wanted.

        Args:
            first: Position of the first.
            states: Outputs of tapped layers for a whole batch, by layer, ``[M, hidden]`` each.
            rows: Which of the M rows they are, in order of positions.
        """
        if self.segment.taps is not None:
            self.segment.taps.record(first, states, rows)

    def commit(self, walked: Walk, states: States, row: int) -> None:
        """Take in the tokens of a step.

        KV of the accepted path moves up behind the anchor's, over that of rejected nodes.

        Args:
            walked: What came out.
            states: As for :meth:`record`.
            row: The anchor's row in them; its tree's nodes follow.
        """
        anchor = len(self.tokens) - 1
        stay = walked.path[: len(walked.tokens) - 1]
        if stay and stay[-1] != len(stay):
            self.segment.keep([anchor + node for node in stay], anchor + 1)
        if anchor >= self.committed:  # not so behind a prefill, which committed the whole text
            self.record(anchor, states, [row, *(row + node for node in stay)])
        self.tokens += walked.tokens
        self.finish = walked.finish
        self.committed = len(self.tokens) - 1
