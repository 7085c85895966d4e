"""Statistics and spans of a generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.telemetry.names import CREATE_CACHE, PROVIDER, Attribute, Span
from paceline.telemetry.tracing import fail, server_attributes, traceparent_of, tracer
from paceline.v1 import verifier_pb2

from ._options import GenerationOptions
from ._text import LOCAL, UNDRAFTED, Undrafted

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import Tracer

_REASONS: dict[str, str] = {
    "no_drafter": "no drafter was there",
    "node_budget": "drafting did not pay",
    "not_ready": "the drafter was not ready",
    "late": "the draft came too late",
    "empty": "nothing was proposed",
    "last_token": "one token was left",
}


_UNHINDERED = frozenset(("no_drafter", "node_budget", "not_ready"))
"""Reasons of steps without a tree that waited for none: they took as long as in plain decoding. So
did those for which the verifier itself had nothing to propose."""
_ENOUGH_STEPS = 16
"""Plain steps of a text with which its speed-up is measured."""

_Values = Mapping[str, Any]


class SourceStats(NamedTuple):
    """What one source of drafted tokens added. A token that several proposed counts for the first
    of them: the verifier's grammar, ngram, recycle, then the drafter."""

    drafted: int
    """Nodes of trees."""
    checked: int
    """How many of them the verifier checked."""
    accepted: int
    """How many of these were accepted."""


@dataclass(frozen=True, slots=True)
class RoundStats:
    """A step with a tree, or consecutive steps without one, measured by the verifier. Times in
    milliseconds, summed over the steps."""

    drafted: int
    """Nodes of the tree; 0 without one."""
    accepted: int
    """Accepted drafted tokens."""
    emitted: int
    """Emitted tokens, the bonus token included."""
    round_ms: float
    """Time from the end of the step before to the end of this one."""
    draft_ms: float
    """Time to draft."""
    verify_ms: float
    """Time of the verifier's steps."""
    queue_ms: float
    """Queueing time in drafter and verifier."""
    checked: int = 0
    """Nodes that the verifier admitted and checked."""
    node_budget: int = 0
    """Maximum number of nodes of the next tree; 0: drafting does not pay at the moment."""
    kv_bytes: int = 0
    """Bytes of the target's KV sent to the drafter; 0 if the drafter maps it."""
    steps: int = 1
    """Engine steps; more than 1 only without a tree."""
    drafter: str = ""
    """Name of the drafter of the tree, or of the one that drafted none; empty: no drafter had the
    text yet."""
    version: str = ""
    """Its version."""
    undrafted: Undrafted | None = None
    """Why there is no tree, as in `Chunk.undrafted`; None with one."""
    plain_ms: float = 0.0
    """Time of as many plain steps under the same load, by those that the verifier's process
    measured; 0: it measured too few."""
    shares: tuple[tuple[str, SourceStats], ...] = ()
    """What each source added to the tree, by name, if local sources of the verifier did; empty: all
    of it is the drafter's."""

    @property
    def transport_ms(self) -> float:
        """The rest: messages between verifier and drafter, and waits."""
        return max(0.0, self.round_ms - self.draft_ms - self.verify_ms - self.queue_ms)

    @classmethod
    def read(cls, message: verifier_pb2.Round) -> RoundStats:
        """Read a round of the verifier, with at least one step."""
        drafter, _, version = message.drafter.partition("@")
        return cls(
            drafted=len(message.tree.tokens),
            accepted=len(message.result.accepted_nodes),
            emitted=len(message.result.tokens),
            round_ms=message.round_us / 1000,
            draft_ms=message.draft_us / 1000,
            verify_ms=message.verify_us / 1000,
            queue_ms=message.queue_us / 1000,
            checked=message.checked_nodes,
            node_budget=message.node_budget,
            kv_bytes=message.kv_bytes,
            steps=message.steps,
            drafter=drafter,
            version=version,
            undrafted=UNDRAFTED.get(message.no_draft),
            plain_ms=message.plain_us / 1000,
            shares=tuple(
                (e.source or drafter, SourceStats(e.drafted, e.checked, e.accepted))
                for e in message.sources
            ),
        )


@dataclass(frozen=True)
class Usage:
    """Tokens of a generation."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int = 0
    """Prompt tokens whose KV came from another cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True, repr=False)
class Stats:
    """Statistics of all rounds; updated while the generation runs."""

    rounds: list[RoundStats] = field(default_factory=list)
    """Every step with a tree in order, and the steps without one between them."""
    verifiers: list[str] = field(default_factory=list)
    """Addresses of the verifiers that generated the text, by first use. Not in `summary`, which a
    gateway sends to its callers."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Failures of drafting and of connections, by reason."""
    problems: list[str] = field(default_factory=list)
    """What kept drafters away, in words. Not in `summary`, as `verifiers`."""
    prefill_ms: float = 0.0
    """Prefill time of the verifier, prefills after a restart included."""
    first_token_ms: float = 0.0
    """Time from the CreateCache request to the first token."""
    total_ms: float = 0.0
    """Time of the whole generation."""
    batch_invariant: bool | None = None
    """Whether all verifiers that generated the text are batch-invariant. If not, drafting may
    change tokens at numeric ties. None until the first response."""
    same_numerics: bool = True
    """Whether all verifiers that generated the text promise the same bits. If not, tokens after
    the text moved to another one may differ at numeric ties."""

    def __repr__(self) -> str:
        return f"<Stats: {self.explain()}>"

    @property
    def accepted_per_position(self) -> list[int]:
        """Number of rounds that accepted the drafted token at depth 1, 2, ..."""
        depth = max((entry.accepted for entry in self.rounds), default=0)
        return [sum(entry.accepted > place for entry in self.rounds) for place in range(depth)]

    @property
    def drafter_versions(self) -> list[str]:
        """Versions of drafters whose trees were verified, as "name@version", by first use."""
        drafted = (entry for entry in self.rounds if entry.drafted)
        return list(dict.fromkeys(f"{entry.drafter}@{entry.version}" for entry in drafted))

    @property
    def sources(self) -> dict[str, SourceStats]:
        """What each source of drafted tokens added, by its name: a local one of the verifier or a
        drafter; the one with the most accepted tokens first."""
        sums: dict[str, SourceStats] = {}
        for entry in self.rounds:
            if entry.drafted:
                whole = SourceStats(entry.drafted, entry.checked, entry.accepted)
                for name, added in entry.shares or ((entry.drafter, whole),):
                    known = sums.get(name, SourceStats(0, 0, 0))
                    sums[name] = SourceStats(*map(sum, zip(known, added, strict=True)))
        return dict(sorted(sums.items(), key=lambda item: item[1].accepted, reverse=True))

    @property
    def undrafted(self) -> Counter[str]:
        """Number of steps without a tree, by reason."""
        counts: Counter[str] = Counter()
        for entry in self.rounds:
            if not entry.drafted:
                counts[entry.undrafted or "unknown"] += entry.steps
        return counts

    @property
    def steps(self) -> int:
        """Number of engine steps, each with a tree or without."""
        return sum(entry.steps for entry in self.rounds)

    @property
    def free_run_tokens(self) -> int:
        """Tokens of rounds without a tree."""
        return sum(entry.emitted for entry in self.rounds if not entry.drafted)

    @property
    def drafted_rounds(self) -> int:
        """Number of rounds with a tree."""
        return sum(1 for entry in self.rounds if entry.drafted)

    @property
    def drafted(self) -> int:
        """Drafted nodes."""
        return sum(entry.drafted for entry in self.rounds)

    @property
    def checked(self) -> int:
        """Drafted nodes that the verifier checked."""
        return sum(entry.checked for entry in self.rounds)

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return sum(entry.accepted for entry in self.rounds)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per drafted round, the bonus token included; 0 without such rounds."""
        emitted = sum(entry.emitted for entry in self.rounds if entry.drafted)
        return emitted / self.drafted_rounds if self.drafted_rounds else 0.0

    @property
    def mean_accepted_drafts(self) -> float:
        """Drafted tokens accepted per drafted round; 0 without such rounds."""
        return self.accepted / self.drafted_rounds if self.drafted_rounds else 0.0

    @property
    def speedup(self) -> float | None:
        """Speed of the rounds over plain decoding's, at most the tokens of a step.

        By the plain steps of the text itself, if it has enough, else an estimate by those that the
        verifier's process measured. None: nothing was drafted, or too few were measured.
        """
        ms = self._own_plain_ms()
        measured = [entry for entry in self.rounds if entry.round_ms and (ms or entry.plain_ms)]
        if not measured or not self.drafted_rounds:
            return None
        plain_ms = sum(entry.emitted * (ms or entry.plain_ms / entry.steps) for entry in measured)
        tokens_a_step: float = sum(entry.emitted for entry in self.rounds) / self.steps
        return min(plain_ms / sum(entry.round_ms for entry in measured), tokens_a_step)

    @property
    def speedup_is_estimate(self) -> bool:
        """Whether there is a `speedup` that is an estimate: the text has too few plain steps of its
        own."""
        return self.speedup is not None and not self._own_plain_ms()

    def _own_plain_ms(self) -> float:
        """Mean time of the plain steps of these rounds; 0: there are too few."""
        plain = [
            entry
            for entry in self.rounds
            if entry.undrafted in _UNHINDERED or (entry.undrafted and entry.drafter == LOCAL)
        ]
        steps = sum(entry.steps for entry in plain)
        return sum(entry.round_ms for entry in plain) / steps if steps >= _ENOUGH_STEPS else 0.0

    @property
    def draft_ms(self) -> float:
        """Compute time of the drafter."""
        return sum(entry.draft_ms for entry in self.rounds)

    @property
    def verify_ms(self) -> float:
        """Time of the verifier's steps."""
        return sum(entry.verify_ms for entry in self.rounds)

    @property
    def queue_ms(self) -> float:
        """Queueing time."""
        return sum(entry.queue_ms for entry in self.rounds)

    @property
    def transport_ms(self) -> float:
        """Time of rounds that is neither computing nor queueing."""
        return sum(entry.transport_ms for entry in self.rounds)

    @property
    def round_ms(self) -> float:
        """Time of all rounds."""
        return sum(entry.round_ms for entry in self.rounds)

    def explain(self) -> str:
        """Say in words who drafted how much, why rounds have no draft, and what drafting gained.

        For example: "dspark@2 drafted 31 of 40 rounds, which emitted 1.9 tokens each; 9 rounds had
        no draft: drafting did not pay (6), the draft came too late (3). About 1.2 times as fast as
        plain decoding."
        """
        undrafted = self.undrafted
        parts = []
        for name in self.drafter_versions:
            rounds = [e for e in self.rounds if e.drafted and f"{e.drafter}@{e.version}" == name]
            length = sum(entry.emitted for entry in rounds) / len(rounds)
            parts.append(
                f"{name} drafted {len(rounds)} of {_count(self.steps, 'round')}, which emitted "
                f"{length:.1f} tokens each"
            )
        if undrafted and parts:
            parts.append(f"{_count(undrafted.total(), 'round')} had no draft: {self._missing()}")
        elif undrafted:
            parts.append(f"none of {_count(self.steps, 'round')} had a draft: {self._missing()}")
        elif not parts:
            parts.append("there were no rounds: the prefill emitted the whole text")
        text = "; ".join(parts) + "."
        if any(entry.shares for entry in self.rounds):
            shares = [
                f"{source.accepted} of {source.checked} by {name}"
                for name, source in self.sources.items()
            ]
            text += f" Accepted of the checked drafts: {', '.join(shares)}."
        if self.drafted_rounds:
            text += f" {self._gain()}"
        if self.fallbacks:
            failures = (f"{count} {reason}" for reason, count in self.fallbacks.most_common())
            text += f" Drafting failed: {', '.join(failures)}."
        for problem in dict.fromkeys(self.problems):
            text += f" {problem[0].upper()}{problem[1:]}."
        return text

    def unused(self, drafter: str | None) -> str:
        """Say in words that a named drafter drafted in no round of a text, and why; empty if none
        is named, it did, or there were only few rounds."""
        name = (drafter or "none").partition("@")[0]
        if name in ("none", LOCAL) or self.steps < _ENOUGH_STEPS:
            return ""
        if any(entry.drafted and entry.drafter == name for entry in self.rounds):
            return ""
        steps = _count(self.steps, "round")
        return f"the drafter {drafter} drafted none of {steps}: {self._missing()}"

    def _missing(self) -> str:
        """Return why steps have no tree, and how many each, the most frequent first."""
        counts = self.undrafted.most_common()
        return ", ".join(f"{_REASONS.get(why, why)} ({count})" for why, count in counts)

    def _gain(self) -> str:
        speedup = self.speedup
        if speedup is None:
            return "Too few plain steps were measured to compare with plain decoding."
        few = ", which is an estimate: few plain steps were measured"
        estimate = few if self.speedup_is_estimate else ""
        return f"About {speedup:.1f} times as fast as plain decoding{estimate}."

    def summary(self) -> dict[str, object]:
        """Return the statistics JSON-ready, rounded to three decimals; times in milliseconds."""
        names = (
            *("steps", "drafted_rounds", "drafted", "checked", "accepted", "mean_accepted_length"),
            *("mean_accepted_drafts", "free_run_tokens", "speedup", "speedup_is_estimate"),
            *("draft_ms", "verify_ms"),
            *("queue_ms", "transport_ms", "round_ms", "prefill_ms", "first_token_ms", "total_ms"),
            *("accepted_per_position", "batch_invariant", "same_numerics", "drafter_versions"),
        )
        return {
            "rounds": len(self.rounds),
            **{name: _rounded(getattr(self, name)) for name in names},
            "undrafted": dict(self.undrafted),
            "fallbacks": dict(self.fallbacks),
            "sources": {name: source._asdict() for name, source in self.sources.items()},
        }

    def merge(self, other: Stats) -> None:
        """Add the statistics of another generation; times are sums."""
        self.rounds += other.rounds
        self.fallbacks.update(other.fallbacks)
        self.problems += other.problems
        self.verifiers = list(dict.fromkeys(self.verifiers + other.verifiers))
        self.same_numerics = self.same_numerics and other.same_numerics
        self.prefill_ms += other.prefill_ms
        self.first_token_ms += other.first_token_ms
        self.total_ms += other.total_ms
        if other.batch_invariant is not None:
            self.batch_invariant = other.batch_invariant and self.batch_invariant is not False


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


class GenerationTrace:
    """The spans of a generation and of its prefills.

    The spans of its rounds are the verifier's and the drafter's, children of the generation's.
    """

    def __init__(self, source: Tracer, root: trace.Span, operation: str) -> None:
        """Use `start`."""
        self._operation = operation
        self._tracer = source
        self._root = root
        self._prefill: trace.Span | None = None
        self.traceparent = traceparent_of(root)
        """Trace context of the generation."""

    @classmethod
    def start(cls, options: GenerationOptions, operation: str) -> GenerationTrace | None:
        """Start the span of the generation, an `operation`, as a child of the current one.

        The span becomes the current one of this task. Returns None if it is not recorded.
        """
        source = tracer()
        if source is None:
            return None
        from opentelemetry import context, trace

        kind = trace.SpanKind.CLIENT
        facts = {Attribute.OPERATION: operation, **_request(options)}
        root = source.start_span(operation, None, kind, facts)
        if not root.is_recording():
            return None
        context.attach(trace.set_span_in_context(root))
        return cls(source, root, operation)

    def served_by(self, model: str) -> None:
        self._root.update_name(f"{self._operation} {model}")
        self._root.set_attributes({Attribute.REQUEST_MODEL: model, Attribute.RESPONSE_MODEL: model})

    def begin_prefill(self, address: str) -> str:
        """Start the span of a prefill; returns the traceparent for the verifier at `address`."""
        from opentelemetry import trace

        parent = trace.set_span_in_context(self._root)
        server = server_attributes(address)
        self._prefill = self._tracer.start_span(
            Span.PREFILL, parent, trace.SpanKind.CLIENT, {**CREATE_CACHE, **server}
        )
        self._root.set_attributes(server)
        return traceparent_of(self._prefill)

    def end_prefill(self, outcome: verifier_pb2.CacheCreated | BaseException | None) -> None:
        """End the prefill's span, if one is open, with the created cache or an error."""
        span, self._prefill = self._prefill, None
        if span is None:
            return
        if isinstance(outcome, BaseException):
            fail(span, outcome)
        elif outcome is not None:
            span.set_attributes(
                {
                    Attribute.QUEUE_DURATION: outcome.queue_us / 1e6,
                    Attribute.COMPUTE_DURATION: outcome.prefill_us / 1e6,
                    Attribute.REUSED_TOKENS: outcome.reused_tokens,
                    Attribute.CACHE_EPOCH: outcome.epoch,
                }
            )
        span.end()

    def finish(
        self, usage: Usage, stats: Stats, finish_reason: str, error: BaseException | None
    ) -> None:
        """End all spans; `error` is the exception of a failed generation."""
        self.end_prefill(error)  # one that a cancellation or a failure interrupted
        self._root.set_attributes(
            {
                Attribute.INPUT_TOKENS: usage.prompt_tokens,
                Attribute.OUTPUT_TOKENS: usage.completion_tokens,
                Attribute.REUSED_TOKENS: usage.reused_tokens,
                Attribute.NUM_DRAFTS: stats.drafted_rounds,
                Attribute.NUM_DRAFT_TOKENS: stats.drafted,
                Attribute.NUM_ACCEPTED: stats.accepted,
            }
        )
        if finish_reason:
            self._root.set_attribute(Attribute.FINISH_REASONS, (finish_reason,))
        if error is not None:
            fail(self._root, error)
        self._root.end()


def _request(options: GenerationOptions) -> _Values:
    values: dict[str, Any] = {
        Attribute.PROVIDER: PROVIDER,
        Attribute.REQUEST_MAX_TOKENS: options.max_new_tokens,
        Attribute.REQUEST_TEMPERATURE: options.temperature,
        Attribute.REQUEST_TOP_P: options.top_p,
        # Seeds are unsigned, attributes signed integers of 64 bits.
        Attribute.REQUEST_SEED: options.key if options.key < 1 << 63 else str(options.key),
    }
    optional = {
        Attribute.REQUEST_TOP_K: options.top_k,
        Attribute.REQUEST_FREQUENCY_PENALTY: options.frequency_penalty,
        Attribute.REQUEST_PRESENCE_PENALTY: options.presence_penalty,
    }
    values |= {key: value for key, value in optional.items() if value}
    if options.drafter is not None:
        values[Attribute.DRAFTER_NAME] = options.drafter
    return values
