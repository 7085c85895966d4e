"""What one engine step emits for one sequence: the one result from acceptance to the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from paceline.tree import TokenTree

if TYPE_CHECKING:
    from paceline.verifier.telemetry import OpenSpans


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was emitted."""
    LENGTH = "length"
    """The most tokens that the request allows were emitted, or the context is full."""


class NoDraft(Enum):
    """Why a step has no drafted tree; see ``paceline.v1.NoDraftReason``."""

    NO_DRAFTER = "no_drafter"
    NODE_BUDGET = "node_budget"
    NOT_READY = "not_ready"
    LATE = "late"
    EMPTY = "empty"
    LAST_TOKEN = "last_token"


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree as it was drafted.

    Attributes:
        tree: At least one node.
        drafter: NAME@VERSION of its drafter.
        draft_us: Time to draft. Unit: microseconds.
        queue_us: Wait at the drafter. Unit: microseconds.
        kv_bytes: KV and hidden states that the drafter received over gRPC for it. Unit: bytes.
    """

    tree: TokenTree
    drafter: str
    draft_us: int = 0
    queue_us: int = 0
    kv_bytes: int = 0


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
        position: Output tokens before these.
        committed: Committed length after the step. Unit: tokens.
        checked: Drafted nodes that the step verified.
        batch_tokens: Tokens in the step, of all sequences.
        queue_us: Wait for the step. Unit: microseconds.
        step_us: Time of the step, acceptance included. Unit: microseconds.
        node_budget: Maximum number of nodes to draft next.
        draft: The drafted tree; None: there was none.
        no_draft: Why there was none; None after a prefill and with a tree.
        fallbacks: Failures of drafting since the step before: reason and message.
        round_began: When the step before ended (time.perf_counter).
        began: When this one began.
        ended: When it ended.
        spans: Spans of its round that were begun; None: there are none.
        steps: Number of steps that are merged in it.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    position: int = 0
    committed: int = 0
    checked: int = 0
    batch_tokens: int = 0
    queue_us: int = 0
    step_us: int = 0
    node_budget: int = 0
    draft: Draft | None = None
    no_draft: NoDraft | None = None
    fallbacks: list[tuple[str, str]] = field(default_factory=list)
    round_began: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    spans: OpenSpans | None = None
    steps: int = 1


def mergeable(first: StepOutput, second: StepOutput) -> bool:
    """Whether two consecutive outputs may be one message: plain steps for the same reason."""
    plain = first.draft is None and second.draft is None and first.no_draft is second.no_draft
    return plain and first.spans is None and second.spans is None


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
        fallbacks=[fallback for each in outputs for fallback in each.fallbacks],
        round_began=first.round_began,
        began=first.began,
        steps=len(outputs),
    )
