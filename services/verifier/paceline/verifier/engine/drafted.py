"""A text that is drafted for, the tree of its next step, and what a step reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from paceline.text import Text
from paceline.tree import EMPTY, TokenTree
from paceline.tree import merge as merge_trees

if TYPE_CHECKING:
    from paceline.verifier.engine.links import SequenceAtDrafter
    from paceline.verifier.engine.local import LocalGuesses
    from paceline.verifier.grammar import Guide

NONE = "none"  # the drafter of a generation that wants none
DRAFTER = "drafter"  # what the drafter service is called among the sources of a tree
# Maximum confidence that is used. Calibration raises survivals to a power, which keeps 1 at 1.
_MAX_CONFIDENCE = 0.98


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
    """What each source added to the tree of a step; empty if there was no tree."""
    if report.draft is None:
        return []
    tree = report.draft.tree
    if not tree.sources:
        return [Share("", len(tree), report.output.checked, len(report.accepted))]
    checked, accepted = Counter(report.sources), Counter(tree.sources[n] for n in report.accepted)
    drafted = Counter(tree.sources).items()
    return [Share(name, count, checked[name], accepted[name]) for name, count in drafted]


def mergeable(first: StepReport, second: StepReport) -> bool:
    """Whether two consecutive reports may be one message: plain, at one drafter, for one reason."""
    plain = first.draft is None and second.draft is None and first.no_draft is second.no_draft
    alike = first.drafter == second.drafter and (first.plain_us > 0) == (second.plain_us > 0)
    return plain and alike and first.call is None and second.call is None


def merge(reports: Sequence[StepReport]) -> StepReport:
    """Consecutive reports that are :func:`mergeable`, at least one, as a single one.

    Tokens are joined and times are added up; committed length, finish reason, node budget and batch
    tokens are those of the last step.
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


class DraftedText:
    """A text that drafters and local sources draft for, and the tree of its next step.

    Only the thread that runs its steps uses it.
    """

    def __init__(
        self,
        text: Text,
        *,
        drafter: str | None = None,
        always_draft: bool = False,
        max_nodes: int = 0,
        timeout: float | None = None,
        isolated: bool = False,
        trace: TracedRounds | None = None,
    ) -> None:
        """Begin without a tree. ``drafter``: NAME or NAME@VERSION; empty: the default one;
        ``local``: the verifier's own guesses alone; None: none. ``always_draft``: before every
        step, whatever the scheduler says; ``max_nodes``: of a tree, 0 for no limit of its own;
        ``timeout``: seconds after which a step goes on without its tree, None: by the drafter's
        mean time; ``isolated``: the drafter uses no other texts for it, nor it for others;
        ``trace``: its rounds that have spans."""
        self.text = text
        self.drafter = drafter
        self.always_draft = always_draft
        self.max_nodes = max_nodes
        self.timeout = timeout
        self.isolated = isolated
        self.trace = trace
        self.drafted_by: str | None = None  # name of the drafter now; None if none did yet
        self.draft: Draft | None = None  # the tree that was drafted for the next step
        self.tree = EMPTY  # its nodes to verify, likeliest first, all of which may be emitted
        self.nodes: tuple[int, ...] = ()  # index in the drafted tree of each node of `tree`
        self.no_draft = NoDraft.NO_DRAFTER  # why there is no tree
        self.local: LocalGuesses | None = None  # the verifier's own guesses; None if it makes none
        self.guess = EMPTY  # the local tree, which a drafter's tree is merged with
        self.at_drafter: SequenceAtDrafter | None = None  # None if it is open at no service
        self.call: DraftCall | None = None  # the request of a tree, in a traced round
        self.retry_at = 0.0  # when it may be opened at a drafter again after a failure
        self.failures = 0  # failures of drafting since the last tree
        self.fallbacks: list[tuple[str, str]] = []  # those not reported yet: reason and message
        self.round_began = perf_counter()  # when the step before ended

    @property
    def guide(self) -> Guide | None:
        """The place of the text in its grammar; None if it has none."""
        return None

    @property
    def read_grant(self) -> bytes:
        """Lets drafters read committed KV; empty if there is none."""
        return b""

    @property
    def committed(self) -> int:
        """Positions whose KV drafters may read. Unit: tokens."""
        return 0

    def set_draft(self, draft: Draft) -> None:
        """Take the tree for the next step, without nodes that the grammar refuses."""
        self.draft = draft
        self.tree, self.nodes = rank(draft.tree, self.text.room - 1)
        if (guide := self.guide) is not None:
            with guide.turn() as ready:
                accepted = guide.accepted_nodes(self.tree) if ready else []
            if len(accepted) < len(self.tree):
                self.tree = self.tree.subtree(accepted)
                self.nodes = tuple(self.nodes[node] for node in accepted)

    @property
    def asked(self) -> bool:
        """Whether a drafter service made the tree of the next step, or a part of it."""
        return self.draft is not None and self.draft.drafter != LOCAL

    def merge_guess(self, tree: TokenTree, nodes: int) -> TokenTree:
        """A drafter's tree, and the local one, as one tree of at most so many nodes."""
        if not len(tree) or tree.proposals or not len(self.guess):
            return tree
        return merge_trees(self.guess, tree, nodes=nodes, depth=self.text.room - 1)

    def report(
        self, output: StepOutput, step: StepTimes, *, queue_us: int = 0, node_budget: int = 0
    ) -> StepReport:
        """Report a step whose tokens the text has, and begin the next round without a tree."""
        traced = self.trace is not None and self.trace.traced
        report = StepReport(
            output,
            position=self.text.output_length - len(output.tokens),
            committed=len(self.text) - 1,
            accepted=[self.nodes[node] for node in output.accepted],
            sources=self.tree.sources[: output.checked],
            draft=self.draft,
            no_draft=None if self.draft is not None else self.no_draft,
            drafter=self._drafter,
            fallbacks=self.fallbacks,
            call=self.call,
            traced=traced,
            batch_tokens=step.tokens,
            queue_us=queue_us,
            step_us=microseconds(step.ended - step.began),
            plain_us=step.plain_us,
            node_budget=node_budget,
            round_began=self.round_began,
            began=step.began,
            ended=step.ended,
        )
        if self.trace is not None:
            self.trace.rounds += 1
        self.draft, self.tree, self.nodes, self.guess = None, EMPTY, (), EMPTY
        self.call, self.fallbacks, self.round_began = None, [], step.ended
        return report

    @property
    def _drafter(self) -> DrafterVersion | None:
        """The drafter of the round, whether it has drafted or not."""
        if self.draft is not None:
            return self.draft.drafter
        if self.at_drafter is not None:
            return self.at_drafter.drafter
        return LOCAL if self.local is not None and self.no_draft is NoDraft.EMPTY else None


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
