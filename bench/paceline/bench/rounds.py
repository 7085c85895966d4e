"""Rounds of a drafter and a verifier in one process, timed part by part, nothing between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoder import Decoder
from paceline.drafter.kv.reader import StreamingReader
from paceline.drafter.methods.base import Budget, Drafter, Generation, Update
from paceline.kv.selection import SelectionPolicy
from paceline.service.sampling import sampling_params
from paceline.v1 import sampling_pb2
from paceline.verifier.engine.batch import Batch
from paceline.verifier.engine.job import Prefill, Round
from paceline.verifier.engine.sequence import Generation as Asked
from paceline.verifier.engine.sequence import Sequence as Text
from paceline.verifier.engine.sequence import States
from paceline.verifier.engine.settle import settle
from paceline.verifier.engine.tree import DraftTree
from paceline.verifier.kv.layout import KvLayout
from paceline.verifier.kv.segment import Segment

_CHUNK = 256  # tokens of a block of a prefill
GREEDY = sampling_pb2.SamplingParams()

Chooses = Callable[[Segment], SelectionPolicy]
"""Makes a selection of positions of a segment."""


@dataclass(frozen=True)
class TimedRound:
    """One round. Times are what LongSpec's table 5 calls draft, target and verify time.

    Attributes:
        draft_ms: Making the tree, the newest tokens taken in before.
        target_ms: The forward pass over anchor and tree.
        settle_ms: Making the batch ready, walking the tree, moving accepted KV.
        nodes: Nodes of the tree.
        emitted: Tokens that came out, the verifier's own included.
    """

    draft_ms: float
    target_ms: float
    settle_ms: float
    nodes: int
    emitted: int

    @property
    def round_ms(self) -> float:
        """All of it."""
        return self.draft_ms + self.target_ms + self.settle_ms


class _Kv(StreamingReader):
    """A text's own KV, as drafters read it; with a selection, at the positions that it chooses."""

    def __init__(self, text: Text, selection: SelectionPolicy | None = None) -> None:
        self._text = text
        self._selection = selection
        self._chosen: list[Tensor] = []

    @property
    def committed(self) -> int:
        return self._text.committed

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        assert isinstance(self._text.segment, Segment)
        return self._text.segment.layer(index)

    def refresh(self, below: int, budget: int) -> int:
        length = super().refresh(below, budget)
        self._chosen = []
        if self._selection is not None and budget:
            self._chosen = self._selection.choose(length, budget)
        return length

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        if not self._chosen:
            return super().parts(layer)
        keys, values = self.layer(layer)
        return [(keys[:, self._chosen[layer]], values[:, self._chosen[layer]])]

    def check(self) -> None:
        """The segment lasts as long as the rounds."""

    def close(self) -> None:
        """The segment is closed by its owner."""


@contextmanager
def _new_text(
    target: Decoder, tokens: Sequence[int], room: int, sampling: sampling_pb2.SamplingParams
) -> Iterator[Text]:
    config = target.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype)
    limit = len(tokens) + room
    segment = Segment(layout, layout.capacity(limit))
    try:
        segment.reserve(segment.capacity)
        asked = Asked(tuple(tokens), sampling=sampling_params(sampling), length_limit=limit)
        yield Text(asked, segment)
    finally:
        segment.close()


@torch.inference_mode()
def continued(
    target: Decoder,
    drafter: Drafter,
    prompt: Sequence[int],
    count: int,
    sampling: sampling_pb2.SamplingParams = GREEDY,
) -> tuple[list[int], list[TimedRound]]:
    """Write at least ``count`` tokens after a prompt.

    Returns:
        The tokens that were written, and the rounds that wrote all but the first of them.
    """
    with _new_text(target, prompt, count + drafter.max_depth + 1, sampling) as text:
        batch = Batch()
        batch.add_prefill(Prefill(text), len(prompt))
        _settled(batch, *batch.forward(target))
        rounds = _rounds(target, drafter, text, sampling)
        timed: list[TimedRound] = []
        while len(text.tokens) - len(prompt) < count:
            timed.append(next(rounds))
        rounds.close()
        return text.tokens[len(prompt) :], timed


@contextmanager
def at_context_text(target: Decoder, context: int, room: int) -> Iterator[Text]:
    """A text behind ``context`` committed positions; tokens, keys and values are random."""
    draws = torch.Generator().manual_seed(context)
    tokens = torch.randint(target.config.vocab_size, (context + 1,), generator=draws).tolist()
    with _new_text(target, tokens, room, GREEDY) as text:
        assert isinstance(text.segment, Segment)
        text.segment.kv[..., :context, :].normal_(generator=draws)
        text.committed = context
        yield text


@torch.inference_mode()
def at_context(target: Decoder, drafter: Drafter, context: int, count: int) -> list[TimedRound]:
    """Rounds of :func:`at_context_text`."""
    with at_context_text(target, context, count * (drafter.max_depth + 1)) as text:
        rounds = _rounds(target, drafter, text, GREEDY)
        timed = [next(rounds) for _ in range(count)]
        rounds.close()
        return timed


@torch.inference_mode()
def continued_each(
    target: Decoder,
    drafters: Mapping[str, tuple[Drafter, Chooses]],
    prompt: Sequence[int],
    count: int,
    sampling: sampling_pb2.SamplingParams = GREEDY,
) -> dict[str, list[TimedRound]]:
    """Write at least ``count`` tokens after a prompt with each drafter, the prompt read once.

    Args:
        target: The target.
        drafters: By name, with what makes the selection of the positions of the target's KV that
            it gets to see; a selection chooses anew for each round.
        prompt: The prompt.
        count: Tokens.
        sampling: How tokens are chosen.

    Raises:
        RuntimeError: They wrote different texts.
    """
    room = count + 2 * max(drafter.max_depth for drafter, _ in drafters.values()) + 2
    found: dict[str, list[TimedRound]] = {}
    texts: list[list[int]] = []
    with _new_text(target, prompt, room, sampling) as first:
        batch = Batch()
        batch.add_prefill(Prefill(first), len(prompt))
        [begun] = _settled(batch, *batch.forward(target))
        for name, (drafter, chooses) in drafters.items():
            text = Text(first.generation, first.segment)
            text.tokens.append(begun)
            text.history.push(begun)
            text.committed = len(prompt)
            assert isinstance(first.segment, Segment)
            selection = chooses(first.segment)
            if selection.observer is not None:
                text.observers.append(selection.observer)
            rounds = _rounds(target, drafter, text, sampling, selection)
            found[name] = []
            while len(text.tokens) - len(prompt) < count:
                found[name].append(next(rounds))
            rounds.close()
            texts.append(text.tokens[: len(prompt) + count])
    if any(text != texts[0] for text in texts):
        raise RuntimeError("drafters changed the text, which must never be")
    return found


def _rounds(
    target: Decoder,
    drafter: Drafter,
    text: Text,
    sampling: sampling_pb2.SamplingParams,
    selection: SelectionPolicy | None = None,
) -> Generator[TimedRound, None, None]:
    """Round after round, without end."""
    prompt, vocab = len(text.generation.prompt), target.config.vocab_size
    kv = _Kv(text, selection)
    drafting = drafter.start(Generation(text.tokens, prompt, vocab, sampling, kv=kv))
    while drafting.backlog:
        drafting.warm(_CHUNK)
    budget = Budget(drafter.max_nodes, drafter.max_depth)
    emitted: list[int] = []
    try:
        while True:
            begun = time.perf_counter()
            if emitted:
                drafting.extend(Update(emitted, text.committed))
            [drafted] = drafter.draft_many([(drafting, budget)])
            has_tree = time.perf_counter()
            tree = DraftTree(drafted.tokens, drafted.parents)
            batch = Batch()
            batch.add_round(Round(text, 0, tree), tree)
            is_ready = time.perf_counter()
            logits, states = batch.forward(target)
            has_logits = time.perf_counter()
            emitted = _settled(batch, logits, states)
            ended = time.perf_counter()
            yield TimedRound(
                draft_ms=(has_tree - begun) * 1e3,
                target_ms=(has_logits - is_ready) * 1e3,
                settle_ms=(is_ready - has_tree + ended - has_logits) * 1e3,
                nodes=len(drafted),
                emitted=len(emitted),
            )
    finally:
        drafting.close()


def _settled(batch: Batch, logits: Tensor, states: States) -> list[int]:
    """Take the batch's one share in; the tokens that came of it."""
    [share] = batch.shares
    outcome = settle(share, logits, states)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.walk is not None
    return outcome.walk.tokens
