"""What one engine step emits for one sequence: the one result from acceptance to the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was emitted."""
    LENGTH = "length"
    """The most tokens that the request allows were emitted, or the context is full."""


@dataclass(slots=True)
class StepOutput:
    """What one engine step emitted for one sequence.

    Acceptance makes it, the engine adds the times of the step, and the service writes it to the
    client.

    Attributes:
        tokens: Emitted tokens, at least one.
        accepted: Indices of the accepted nodes in the drafted tree, from the anchor down. One fewer
            than ``tokens``, unless the last token ended the generation and was drafted too.
        finish: Why the generation ended; None: it has not ended.
        logprobs: Raw log-probability of each token; empty unless the request has logprobs.
        top_logprobs: Likeliest (token, log-probability) pairs at each position; empty unless the
            request has top_logprobs.
        committed: Committed length after the step. Unit: tokens.
        checked: Drafted nodes that the step verified.
        batch_tokens: Tokens in the step, of all sequences.
        queue_us: Wait for the step. Unit: microseconds.
        step_us: Time of the step, acceptance included. Unit: microseconds.
        node_budget: Most nodes to draft next.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    committed: int = 0
    checked: int = 0
    batch_tokens: int = 0
    queue_us: int = 0
    step_us: int = 0
    node_budget: int = 0


def merge(outputs: Sequence[StepOutput]) -> StepOutput:
    """Consecutive outputs of one round, at least one, as a single output.

    Tokens are joined and times are added up; committed length, finish reason, node budget and batch
    tokens are those of the last step.
    """
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return replace(
        last,
        tokens=[token for each in outputs for token in each.tokens],
        accepted=[node for each in outputs for node in each.accepted],
        logprobs=[logprob for each in outputs for logprob in each.logprobs],
        top_logprobs=[top for each in outputs for top in each.top_logprobs],
        checked=sum(each.checked for each in outputs),
        queue_us=sum(each.queue_us for each in outputs),
        step_us=sum(each.step_us for each in outputs),
    )
