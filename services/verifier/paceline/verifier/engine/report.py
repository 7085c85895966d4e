"""What a step of a text reports: the tokens that it emitted, and the draft that it verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from paceline.tree import TokenTree

NONE = "none"  # the drafter of a generation that wants none
DRAFTER = "drafter"  # what the drafter service is called among the sources of a tree


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


class DraftCall(NamedTuple):
    """A tree that was requested in a traced round, whether it came or not."""

    traceparent: str  # of its span, whose child the drafter's is
    began: float  # when it was requested (time.perf_counter)
    ended: float  # when its wait was over
    drafter: str
    carrier: str  # how messages travel: socket or stream
    kv_transport: str  # empty if the drafter has not opened the text
    no_draft: NoDraft | None  # why no tree came; None if one did


@dataclass(slots=True)
class TracedRounds:
    """Which rounds of a text have spans: the first ones, and then one in so many."""

    traceparent: str  # of the text's span
    first: int = 0
    every: int = 1
    rounds: int = 0  # those that have ended

    @property
    def traced(self) -> bool:
        """Whether the present round has spans."""
        return self.rounds < self.first or self.rounds % self.every == 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step emitted for one text."""

    tokens: Sequence[int]  # at least one
    # Indices of the accepted nodes in the verified tree, from the anchor down. One fewer than
    # `tokens`, unless the last token ended the generation and was drafted too.
    accepted: Sequence[int] = ()
    finish: FinishReason | None = None  # why the generation ended; None if it has not ended
    checked: int = 0  # nodes of the verified tree
    # Raw log-probability of each token; empty unless requested.
    logprobs: Sequence[float] = ()
    # Likeliest (token, log-probability) pairs at each position; empty unless requested.
    top_logprobs: Sequence[list[tuple[int, float]]] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """An engine step of any number of texts."""

    began: float  # time.perf_counter
    ended: float
    tokens: int = 0  # batch tokens
    # Time of a plain step under the same load; 0 if it was not measured. Unit: microseconds.
    plain_us: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of a text for its client, metrics and spans: what it emitted, and how it came about.

    Several plain steps may be merged in one.
    """

    output: StepOutput
    position: int  # output tokens before these
    committed: int  # committed length after the step. Unit: tokens.
    accepted: Sequence[int] = ()  # accepted nodes, as indices in the drafted tree
    sources: tuple[str, ...] = ()  # of the checked nodes, as in `TokenTree`
    draft: Draft | None = None  # the drafted tree; None if there was none
    no_draft: NoDraft | None = None  # why there was none
    # The drafter at which the generation is open; None if it is open at none.
    drafter: DrafterVersion | None = None
    fallbacks: Sequence[tuple[str, str]] = ()  # failures since the step before: reason and message
    call: DraftCall | None = None  # the request of a tree, in a traced round
    traced: bool = False  # whether the round has spans
    batch_tokens: int = 0  # tokens in the step, of all sequences
    queue_us: int = 0  # wait for the step. Unit: microseconds.
    step_us: int = 0  # time of the step, acceptance included. Unit: microseconds.
    plain_us: int = 0  # as in `StepTimes`
    node_budget: int = 0  # maximum number of nodes to draft next
    round_began: float = 0.0  # when the step before ended (time.perf_counter)
    began: float = 0.0
    ended: float = 0.0
    steps: int = 1  # number of steps that are merged in it


class Share(NamedTuple):
    """What one source added to the tree of a step."""

    source: str  # name of a local source; empty: the drafter service
    drafted: int  # nodes of the tree that it was the first to propose
    checked: int  # how many of them the step verified
    accepted: int  # how many of these were accepted


def shares(report: StepReport) -> list[Share]:
    """Return what each source added to the tree of a step; empty if there was no tree."""
    if report.draft is None:
        return []
    tree = report.draft.tree
    if not tree.sources:
        return [Share("", len(tree), report.output.checked, len(report.accepted))]
    checked, accepted = Counter(report.sources), Counter(tree.sources[n] for n in report.accepted)
    drafted = Counter(tree.sources).items()
    return [Share(name, count, checked[name], accepted[name]) for name, count in drafted]


def mergeable(first: StepReport, second: StepReport) -> bool:
    """Tell whether two consecutive reports may be one: plain, at one drafter, for one reason."""
    plain = first.draft is None and second.draft is None and first.no_draft is second.no_draft
    alike = first.drafter == second.drafter and (first.plain_us > 0) == (second.plain_us > 0)
    return plain and alike and first.call is None and second.call is None


def merge(reports: Sequence[StepReport]) -> StepReport:
    """Return consecutive reports that are :func:`mergeable`, at least one, as a single one.

    Tokens are joined and times are added up; committed length, finish reason, node budget and batch
    tokens are the last step's.
    """
    first, last = reports[0], reports[-1]
    if len(reports) == 1:
        return last
    outputs = [report.output for report in reports]
    return replace(
        last,
        output=replace(
            last.output,
            tokens=[token for output in outputs for token in output.tokens],
            logprobs=[logprob for output in outputs for logprob in output.logprobs],
            top_logprobs=[top for output in outputs for top in output.top_logprobs],
        ),
        position=first.position,
        queue_us=sum(report.queue_us for report in reports),
        step_us=sum(report.step_us for report in reports),
        plain_us=sum(report.plain_us for report in reports),
        fallbacks=[fallback for report in reports for fallback in report.fallbacks],
        round_began=first.round_began,
        began=first.began,
        traced=any(report.traced for report in reports),
        steps=len(reports),
    )


def microseconds(seconds: float) -> int:
    """Return whole microseconds, never negative."""
    return max(0, round(seconds * 1e6))
