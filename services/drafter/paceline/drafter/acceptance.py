"""What a drafter's trees are worth on a target's own texts, measured in one process.

What a target writes depends on no drafter. So a text is recorded once, by plain steps, and any
number of drafters can be tried on it: a round's tree is walked along the text that is known
already, and no tree is ever run through the target. On a CPU the outcome is exactly that of rounds
with a verifier, whose KV has the same bits; elsewhere up to ties within rounding.

Used by training and by the benchmarks; a service never imports this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.decoder import Decoder, LocalCache
from paceline.drafter.kv.shared import streaming_parts
from paceline.drafter.methods.base import Budget, Drafter, Generation, Update
from paceline.drafter.methods.slots import chain_segments
from paceline.drafter.tree import Tree
from paceline.kernels import History, choose_token, plan_trees
from paceline.service.sampling import sampling_params
from paceline.v1 import sampling_pb2

GREEDY = sampling_pb2.SamplingParams()
_PREFILL = 1024  # tokens of a forward pass


class RecordedStates:
    """A recording's hidden states up to a movable committed length; a :class:`TargetStates`."""

    def __init__(self, states: Tensor, window: int) -> None:
        """Of one row a position, ``[S, layers * hidden]``; ``window`` as in ``Needs``."""
        self.committed = 0
        """Positions that may be read. Unit: tokens."""
        self._states = states
        self._window = window

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """See :meth:`TargetStates.read`."""
        oldest = max(0, self.committed - self._window) if self._window else 0
        first = min(end, max(begin, oldest))
        return first, self._states[first:end]

    def check(self) -> None:
        """Nothing: they are there as long as the recording."""


class RecordedKv:
    """A recording's KV up to a movable committed length; a :class:`TargetKv`."""

    def __init__(self, cache: LocalCache) -> None:
        self.committed = 0
        """Positions that may be read. Unit: tokens."""
        self._cache = cache

    def parts(self, index: int, below: int, budget: int) -> list[tuple[Tensor, Tensor]]:
        """See :meth:`TargetKv.parts`: the first and the newest positions."""
        return streaming_parts(self._cache.layer(index), min(self.committed, below), budget)

    def check(self) -> None:
        """Nothing: it is there as long as the recording."""


@dataclass(frozen=True)
class Recording:
    """A text that a target wrote, with the keys and values it left behind.

    Attributes:
        tokens: Prompt and continuation.
        prompt_length: How many of them are the prompt.
        vocab_size: The target's.
        sampling: How the continuation was chosen.
        cache: KV of all tokens but the last.
        states: Outputs of the layers asked for, by layer, ``[S, hidden]`` each, at the same
            positions.
    """

    tokens: list[int]
    prompt_length: int
    vocab_size: int
    sampling: sampling_pb2.SamplingParams
    cache: LocalCache
    states: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def continuation(self) -> list[int]:
        """What the target wrote."""
        return self.tokens[self.prompt_length :]


def record(
    target: Decoder,
    prompt: Sequence[int],
    count: int,
    sampling: sampling_pb2.SamplingParams = GREEDY,
    layers: Collection[int] = (),
) -> Recording:
    """Let a target write ``count`` tokens after a prompt; no token ends the text.

    Outputs of ``layers`` are kept, for drafters that read them.

    Raises:
        ValueError: The prompt is empty, or the text would not fit the target's context.
    """
    config = target.config
    if not prompt or len(prompt) + count > config.max_position:
        raise ValueError(
            f"{len(prompt)} tokens of prompt and {count} new ones, expected at least one and "
            f"together at most {config.max_position}, the target's context"
        )
    params = sampling_params(sampling)
    cache = LocalCache(config, target.device)
    cache.reserve(len(prompt) + count)
    tokens, history = list(prompt), History(prompt)
    taps: dict[int, list[Tensor]] = {layer: [] for layer in sorted(layers)}
    while len(history) < len(prompt) + count:
        stop = min(len(tokens), len(cache) + _PREFILL)
        logits = _feed(target, cache, tokens[len(cache) : stop], taps)
        if stop == len(tokens):
            tokens.append(choose_token(logits, params, stop, history))
            history.push(tokens[-1])
    states = {layer: torch.cat(parts) for layer, parts in taps.items()}
    return Recording(tokens, len(prompt), config.vocab_size, sampling, cache, states)


def replay(
    target: Decoder,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: sampling_pb2.SamplingParams = GREEDY,
    layers: Collection[int] = (),
) -> Recording:
    """A text that the target wrote before, read once more.

    Raises:
        ValueError: Prompt or text is empty, or they do not fit the target's context.
    """
    read = record(target, [*prompt, *tokens[:-1]], 1, sampling, layers)
    text = [*prompt, *tokens]
    return replace(read, tokens=text, prompt_length=len(prompt))


def accepted_lengths(
    drafter: Drafter,
    recording: Recording,
    *,
    sampling: sampling_pb2.SamplingParams | None = None,
) -> list[int]:
    """Drafted tokens that stand in each round of a recorded text; the bonus token is not counted.

    For the arguments see :func:`rounds`.
    """
    return [standing(tree, after) for tree, after in rounds(drafter, recording, sampling=sampling)]


def rounds(
    drafter: Drafter,
    recording: Recording,
    *,
    sampling: sampling_pb2.SamplingParams | None = None,
    kv: RecordedKv | None = None,
) -> Iterator[tuple[Tree, list[int]]]:
    """The tree of each round of a recorded text, and how the text goes on.

    Rounds begin while a path of full depth still fits the text, so that its end cuts none short.

    Args:
        drafter: Made for the recording's target.
        recording: The text; with the hidden states that the drafter reads, if any.
        sampling: How the drafter is told that tokens are chosen; None: as they were.
        kv: The recording's KV, as the drafter reads it; None: by the policy ``streaming``.
    """
    tokens, needs, states = recording.tokens, drafter.needs, None
    kv = kv or RecordedKv(recording.cache)
    if needs.hidden_state_layers:
        rows = torch.cat([recording.states[layer] for layer in needs.hidden_state_layers], dim=1)
        states = RecordedStates(rows, needs.hidden_state_window)
    length = recording.prompt_length + 1
    budget = Budget(drafter.max_nodes, drafter.max_depth)
    kv.committed = length - 1
    if states is not None:
        states.committed = length - 1
    sequence = drafter.start(
        Generation(
            tokens[:length],
            recording.prompt_length,
            recording.vocab_size,
            recording.sampling if sampling is None else sampling,
            kv=kv,
            states=states,
        )
    )
    try:
        while length + budget.depth <= len(tokens):
            tree, following = sequence.draft(budget), tokens[length : length + budget.depth]
            yield tree, following
            emitted = tokens[length : length + standing(tree, following) + 1]
            length += len(emitted)
            kv.committed = length - 1
            if states is not None:
                states.committed = length - 1
            sequence.extend(Update(emitted, committed_length=kv.committed))
    finally:
        sequence.close()


def standing(tree: Tree, following: Sequence[int]) -> int:
    """Tokens of a tree that stand where ``following`` is what comes after the anchor."""
    # Equal siblings say the same thing: nodes are found by path, as the verifier merges them.
    paths = {tree.path(node) for node in range(len(tree))}
    count = 0
    while count < len(following) and tuple(following[: count + 1]) in paths:
        count += 1
    return count


def _feed(
    target: Decoder, cache: LocalCache, tokens: Sequence[int], taps: Mapping[int, list[Tensor]]
) -> Tensor:
    """Run tokens behind what is cached; logits of the last one, ``[V]`` on the CPU.

    ``taps`` get the outputs of their layers.
    """
    begin = len(cache)
    plan = plan_trees(chain_segments(0, begin, begin + len(tokens)), device=target.device)
    result = target.forward(
        torch.tensor(tokens, device=target.device),
        plan,
        [cache],
        logit_rows=torch.tensor([len(tokens) - 1], device=target.device),
        taps=list(taps),
    )
    for parts, rows in zip(taps.values(), result.taps, strict=True):
        parts.append(rows.cpu())
    cache.commit(range(len(tokens)))
    return result.logits[0].cpu()
