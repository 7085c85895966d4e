"""Accepted length of a drafter on texts of its target, measured in one process.

The target's text does not depend on the drafter. It is recorded once, by plain decoding, and any
number of drafters are measured on it: the tree of each round is compared with the recorded text,
and no tree is run through the target. On a CPU the result is as in rounds with a verifier,
whose KV has the same bits; elsewhere up to ties within rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.decoder import Decoder, LocalCache
from paceline.drafter.growth.sequence import chain_blocks
from paceline.drafter.kv.reader import StateReader, StreamingReader
from paceline.drafter.methods.base import Budget, Drafter, GenerationInfo, Update
from paceline.kernels import plan_trees
from paceline.kernels.sampling import History, choose_token
from paceline.sampling import Sampling
from paceline.text import sampling_rules
from paceline.tree import TokenTree, accepted_tokens

GREEDY = Sampling()
_PREFILL = 1024  # tokens of a forward pass


class RecordedStates(StateReader):
    """A recording's hidden states up to a movable committed length."""

    committed = 0

    def __init__(self, states: Tensor, window: int) -> None:
        """Of one row per position, ``[S, layers * hidden]``; ``window`` as in ``Needs``."""
        self._states = states
        self._window = window

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        oldest = max(0, self.committed - self._window) if self._window else 0
        first = min(end, max(begin, oldest))
        return first, self._states[first:end]

    def check(self) -> None:
        """The recording always exists."""

    def close(self) -> None:
        """Nothing to release."""


class RecordedKv(StreamingReader):
    """A recording's KV up to a movable committed length."""

    committed = 0

    def __init__(self, cache: LocalCache) -> None:
        self._cache = cache

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._cache.layer(index)

    def check(self) -> None:
        """The recording always exists."""

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class Recording:
    """A text as token ids of the target's tokenizer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the generated tokens
    temperature: float = 0.0
    seed: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True)
class TargetRecording:
    """A text that a target generated, with its KV and hidden states."""

    tokens: list[int]  # prompt and continuation
    prompt_length: int  # number of prompt tokens
    vocab_size: int  # number of token ids of the target
    sampling: Sampling  # sampling parameters of the continuation
    cache: LocalCache  # KV of all tokens but the last
    # Outputs of the recorded layers at the same positions, by layer, `[S, hidden]`.
    states: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def continuation(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def record(
    target: Decoder,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling = GREEDY,
    layers: Collection[int] = (),
) -> TargetRecording:
    """Generate ``count`` tokens after a prompt, end tokens included, and :func:`replay` them.
    Raises ``ValueError`` if the prompt is empty, or the text does not fit the target's context."""
    _check_length(target, prompt, count)
    reading, text = _Reading(target, layers), [*prompt]
    rules, history = sampling_rules(sampling), History(prompt)
    for _ in range(count):
        text.append(choose_token(reading.read(text), rules, len(text), history))
        history.push(text[-1])
    return reading.recording(text, len(prompt), sampling)


def replay(
    target: Decoder,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling = GREEDY,
    layers: Collection[int] = (),
) -> TargetRecording:
    """Record the KV of a text that the target generated before, and the outputs of ``layers``.

    Raises:
        ValueError: Prompt or text is empty, or they do not fit the target's context.
    """
    _check_length(target, prompt, len(tokens))
    text, reading = [*prompt, *tokens], _Reading(target, layers)
    reading.read(text[:-1])
    return reading.recording(text, len(prompt), sampling)


class _Reading:
    """A text that is read: its KV, and the outputs of some layers."""

    def __init__(self, target: Decoder, layers: Collection[int]) -> None:
        self._target, self._cache = target, LocalCache(target.config, target.device)
        self._taps: dict[int, list[Tensor]] = {layer: [] for layer in sorted(layers)}

    def read(self, text: Sequence[int]) -> Tensor:
        """Read what is new of a text; returns the logits of its last token, ``[vocabulary]``."""
        cache, device = self._cache, self._target.device
        while len(cache) < len(text):
            part = text[len(cache) : len(cache) + _PREFILL]
            plan = plan_trees(chain_blocks(0, len(cache), len(cache) + len(part)), device=device)
            last = torch.tensor([len(part) - 1], device=device)
            cache.reserve(len(part))
            result = self._target.forward(
                torch.tensor(part, device=device), plan, [cache], logit_rows=last,
                taps=list(self._taps),
            )  # fmt: skip
            for parts, rows in zip(self._taps.values(), result.taps, strict=True):
                parts.append(rows.cpu())
            cache.commit(range(len(part)))
        return result.logits[0]

    def recording(self, text: list[int], prompt: int, sampling: Sampling) -> TargetRecording:
        """Of a text of which all but the last token is read, with `prompt` tokens of its prompt."""
        states = {layer: torch.cat(parts) for layer, parts in self._taps.items()}
        vocabulary = self._target.config.vocab_size
        return TargetRecording(text, prompt, vocabulary, sampling, self._cache, states)


def _check_length(target: Decoder, prompt: Sequence[int], count: int) -> None:
    longest = target.config.max_position
    if not prompt or count < 1 or len(prompt) + count > longest:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {count} new ones, expected at least one of each and "
            f"together at most {longest}, the target's context"
        )


def accepted_per_round(drafter: Drafter, recording: TargetRecording) -> list[int]:
    """Return accepted draft tokens of each round along a recorded text, without bonus tokens."""
    return [accepted_tokens(tree, after) for tree, after in rounds(drafter, recording)]


def rounds(
    drafter: Drafter, recording: TargetRecording, kv: RecordedKv | None = None
) -> Iterator[tuple[TokenTree, list[int]]]:
    """Draft along a recorded text.

    The last round is the last one in which a path of full depth fits the text.

    Args:
        recording: The text, with the hidden states that the drafter reads, if any.
        kv: Its KV, where the drafter is to read it by another policy than ``streaming``.

    Yields:
        The tree of a round, and the text after its anchor, as long as the drafter's depth.
    """
    tokens, needs, states = recording.tokens, drafter.needs, None
    kv = kv or RecordedKv(recording.cache)
    if needs.hidden_state_layers:
        rows = torch.cat([recording.states[layer] for layer in needs.hidden_state_layers], dim=1)
        states = RecordedStates(rows, needs.hidden_state_window)

    def commit(committed: int) -> None:
        kv.committed = committed
        if states is not None:
            states.committed = committed

    length = recording.prompt_length + 1
    commit(length - 1)
    budget = Budget(drafter.max_nodes, drafter.max_depth)
    sequence = drafter.start(
        GenerationInfo(
            tokens[:length],
            recording.prompt_length,
            recording.vocab_size,
            recording.sampling,
            kv=kv,
            states=states,
        )
    )
    try:
        while length + budget.depth <= len(tokens):
            tree, after = sequence.draft(budget), tokens[length : length + budget.depth]
            yield tree, after
            emitted = tokens[length : length + accepted_tokens(tree, after) + 1]
            length += len(emitted)
            commit(length - 1)
            sequence.extend(Update(emitted, committed_length=length - 1))
    finally:
        sequence.close()
