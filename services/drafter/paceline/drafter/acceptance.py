"""What a drafter's trees are worth on a target's own texts, measured in one process.

What a target writes depends on no drafter. So a text is recorded once, by plain steps, and any
number of drafters can be tried on it: a round's tree is walked along the text that is known
already, and no tree is ever run through the target. On a CPU the outcome is exactly that of rounds
with a verifier, whose KV has the same bits; elsewhere up to ties within rounding.

Used by training and by the benchmarks; a service never imports this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.decoder import Decoder, LocalCache
from paceline.drafter.kv.shared import streaming_parts
from paceline.drafter.methods.base import Budget, Drafter, Generation, Update
from paceline.drafter.methods.lm_sequence import chain_segments
from paceline.drafter.tree import Tree
from paceline.kernels import History, choose_token, plan_trees
from paceline.service.sampling import sampling_params
from paceline.v1 import sampling_pb2

GREEDY = sampling_pb2.SamplingParams()
_PREFILL = 1024  # tokens of a forward pass


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
    """

    tokens: list[int]
    prompt_length: int
    vocab_size: int
    sampling: sampling_pb2.SamplingParams
    cache: LocalCache

    @property
    def continuation(self) -> list[int]:
        """What the target wrote."""
        return self.tokens[self.prompt_length :]


def record(
    target: Decoder,
    prompt: Sequence[int],
    count: int,
    sampling: sampling_pb2.SamplingParams = GREEDY,
) -> Recording:
    """Let a target write ``count`` tokens after a prompt; no token ends the text.

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
    while len(history) < len(prompt) + count:
        stop = min(len(tokens), len(cache) + _PREFILL)
        logits = _feed(target, cache, tokens[len(cache) : stop])
        if stop == len(tokens):
            tokens.append(choose_token(logits, params, stop, history))
            history.push(tokens[-1])
    return Recording(tokens, len(prompt), config.vocab_size, sampling, cache)


def accepted_lengths(
    drafter: Drafter,
    recording: Recording,
    *,
    sampling: sampling_pb2.SamplingParams | None = None,
) -> list[int]:
    """Drafted tokens that stand in each round of a recorded text; the bonus token is not counted.

    Rounds begin while a path of full depth still fits the text, so that its end cuts none short.

    Args:
        drafter: Made for the recording's target.
        recording: The text.
        sampling: How the drafter is told that tokens are chosen; None: as they were.
    """
    tokens, kv = recording.tokens, RecordedKv(recording.cache)
    length = recording.prompt_length + 1
    budget = Budget(drafter.max_nodes, drafter.max_depth)
    kv.committed = length - 1
    sequence = drafter.start(
        Generation(
            tokens[:length],
            recording.prompt_length,
            recording.vocab_size,
            recording.sampling if sampling is None else sampling,
            kv=kv,
        )
    )
    accepted = []
    try:
        while length + budget.depth <= len(tokens):
            found = standing(sequence.draft(budget), tokens[length : length + budget.depth])
            accepted.append(found)
            emitted = tokens[length : length + found + 1]
            length += len(emitted)
            kv.committed = length - 1
            sequence.extend(Update(emitted, committed_length=kv.committed))
    finally:
        sequence.close()
    return accepted


def standing(tree: Tree, following: Sequence[int]) -> int:
    """Tokens of a tree that stand where ``following`` is what comes after the anchor."""
    # Equal siblings say the same thing: nodes are found by path, as the verifier merges them.
    paths = {tree.path(node) for node in range(len(tree))}
    count = 0
    while count < len(following) and tuple(following[: count + 1]) in paths:
        count += 1
    return count


def _feed(target: Decoder, cache: LocalCache, tokens: Sequence[int]) -> Tensor:
    """Run tokens behind what is cached; logits of the last one, ``[V]`` on the CPU."""
    begin = len(cache)
    plan = plan_trees(chain_segments(0, begin, begin + len(tokens)), device=target.device)
    result = target.forward(
        torch.tensor(tokens, device=target.device),
        plan,
        [cache],
        logit_rows=torch.tensor([len(tokens) - 1], device=target.device),
    )
    cache.commit(range(len(tokens)))
    return result.logits[0].cpu()
