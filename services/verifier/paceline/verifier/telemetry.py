"""Reports the engine's work as metrics and spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.telemetry.names import CREATE_CACHE, Attribute, Span
from paceline.telemetry.tracing import add_server_span, remote_context, traceparent_of
from paceline.verifier.engine.job import Decode, DrafterVersion, Prefill, StepOutput, shares
from paceline.verifier.store import Cache

if TYPE_CHECKING:
    from opentelemetry import context, trace
    from opentelemetry.sdk.trace import Tracer

    from paceline.verifier.metrics import VerifierMetrics

DRAFTER = "drafter"  # what the drafter service is called among the sources of a tree


@dataclass(slots=True)
class FollowCounts:
    """Counts of all streams of a verifier. Written by the event loop, read by any thread."""

    streams: int = 0  # open streams
    updates: int = 0  # updates that were begun
    bytes: int = 0  # bytes of all messages sent


class OpenSpans(NamedTuple):
    """The spans of a round that is drafted for."""

    round: trace.Span
    draft: trace.Span


class RoundSpans:
    """Begins the spans of a generation's drafted rounds. Only the engine thread uses it.

    A long text has thousands of rounds. The first ones are traced, and then one in so many.

    The span of a draft has to begin when the tree is requested, since the drafter's span is its
    child. All other spans are made when the step is reported (:meth:`Telemetry.answered`).
    """

    def __init__(
        self,
        tracer: Tracer,
        traceparent: str,
        parent: context.Context,
        rounds: tuple[int, int] = (0, 1),
    ) -> None:
        """Begin; ``rounds``: how many first ones are traced, and n of each n-th after them."""
        self.traceparent = traceparent  # `traceparent` of the generation's span
        self.parent = parent  # the parsed `traceparent`; any thread may read it
        self._tracer = tracer
        self._first, self._every = rounds
        self._step = 0
        self._open: OpenSpans | None = None

    @property
    def _traced(self) -> bool:
        return self._step < self._first or self._step % self._every == 0

    def begin_draft(self, round_began: float) -> str:
        """Begin the spans of a round, which began at a time of time.perf_counter, and of its draft.
        Returns the traceparent of the draft; empty: the round is not traced."""
        if not self._traced:
            return ""
        from opentelemetry.trace import SpanKind, set_span_in_context

        began = self._tracer.start_span(
            Span.ROUND, self.parent, start_time=_wall_clock() + _ns(round_began)
        )
        context = set_span_in_context(began)
        draft = self._tracer.start_span(Span.DRAFT, context, SpanKind.CLIENT)
        self._open = OpenSpans(began, draft)
        return traceparent_of(draft)

    def end_draft(self, job: Decode) -> None:
        """End the span of the draft; without a tree it was late, empty, or the drafter failed."""
        if self._open is None:
            return
        span, draft, sequence = self._open.draft, job.draft, job.sequence_at_drafter
        if sequence is not None:
            span.set_attribute(Attribute.DRAFTER_NAME, sequence.name)
            span.set_attribute(Attribute.DRAFT_CARRIER, sequence.link.carrier)
            if sequence.opened is not None:
                transport = sequence.opened.kv_transport or "none"
                span.set_attribute(Attribute.KV_TRANSPORT, transport)
        if draft is None:
            span.set_attribute(Attribute.NO_DRAFT, job.no_draft.value)
        else:
            span.set_attributes(
                {
                    **_drafter(draft.drafter),
                    Attribute.NUM_DRAFT_TOKENS: len(draft.tree),
                    Attribute.QUEUE_DURATION: draft.queue_us / 1e6,
                    Attribute.COMPUTE_DURATION: draft.draft_us / 1e6,
                    Attribute.KV_BYTES: draft.kv_bytes,
                }
            )
        span.end()

    def close(self) -> None:
        """End the spans of a round that will have no step."""
        for span in reversed(self._open or ()):
            if span.is_recording():  # it has not ended
                span.end()
        self._open = None

    def take(self) -> tuple[OpenSpans | None, bool]:
        """The spans of the round that its step ends, if there are any, and whether to trace it."""
        traced, self._step = self._traced, self._step + 1
        spans, self._open = self._open, None
        return spans, traced

    def end_round(self, output: StepOutput, facts: Mapping[str, Any]) -> None:
        """End the spans of a round that :meth:`take` told to trace, or add one without a draft.
        ``facts`` are more attributes of it. Any thread may call it."""
        from opentelemetry.trace import set_span_in_context

        clock = _wall_clock()
        if output.spans is not None:
            span = output.spans.round
        else:
            span = self._tracer.start_span(
                Span.ROUND, self.parent, start_time=clock + _ns(output.round_began)
            )
        verify = self._tracer.start_span(
            Span.VERIFY,
            set_span_in_context(span),
            attributes={
                Attribute.NUM_EMITTED: len(output.tokens),
                Attribute.QUEUE_DURATION: output.queue_us / 1e6,
                Attribute.COMPUTE_DURATION: output.step_us / 1e6,
                Attribute.BATCH_TOKENS: output.batch_tokens,
            },
            start_time=clock + _ns(output.began),
        )
        ended = clock + _ns(output.ended)
        verify.end(ended)
        span.set_attributes({**_round_attributes(output), **facts})
        span.end(ended)


class Telemetry:
    """Reports jobs to metrics and a tracer, as far as the verifier has them.

    Used on the event loop.
    """

    def __init__(
        self,
        metrics: VerifierMetrics | None,
        tracer: Tracer | None,
        rounds: tuple[int, int] = (0, 1),
    ) -> None:
        """Report to what there is; `rounds` as in :class:`RoundSpans`."""
        self._metrics = metrics
        self._tracer = tracer
        self._rounds = rounds

    def admitted(self, cache: Cache) -> None:
        """Report the start of a generation."""
        if self._metrics is not None:
            self._metrics.admitted(cache)

    def report_prefill(self, cache: Cache, job: Prefill, traceparent: str) -> None:
        """Report a prefill once it is done; `traceparent` is its caller's."""
        if self._metrics is not None or self._tracer is not None:
            job.on_done = partial(self._prefilled, cache, job, traceparent, time_ns())

    def round_spans(self, traceparent: str) -> RoundSpans | None:
        """Spans for a generation; None if it is not traced."""
        if self._tracer is None:
            return None
        parent = remote_context(traceparent)
        return (
            None if parent is None else RoundSpans(self._tracer, traceparent, parent, self._rounds)
        )

    def answered(self, cache: Cache, output: StepOutput, spans: RoundSpans | None) -> None:
        """Report a step, or consecutive plain ones, after its tokens were sent.

        `spans` are its generation's; None if it is not traced.
        """
        if self._metrics is not None:
            self._metrics.answered(cache, output)
        if self._tracer is None or spans is None:
            return
        cache.rounds += 1
        if output.traced:
            facts = {Attribute.ROUND_INDEX: cache.rounds, Attribute.CACHE_EPOCH: cache.epoch}
            spans.end_round(output, facts)

    def _prefilled(self, cache: Cache, job: Prefill, traceparent: str, began_ns: int) -> None:
        if self._metrics is not None:
            self._metrics.prefilled(cache, job)
        if self._tracer is not None and traceparent:
            attributes: dict[str, Any] = {
                **CREATE_CACHE,
                Attribute.INPUT_TOKENS: job.sequence.text.given,
                Attribute.REUSED_TOKENS: job.reused,
                Attribute.QUEUE_DURATION: job.queue_us / 1e6,
                Attribute.COMPUTE_DURATION: job.step_us / 1e6,
                Attribute.CACHE_EPOCH: cache.epoch,
            }
            name = Span.VERIFIER_PREFILL
            ended = _wall_clock() + _ns(job.ended) if job.ended else None
            add_server_span(self._tracer, name, traceparent, began_ns, ended, attributes, job.error)


def _round_attributes(output: StepOutput) -> dict[str, Any]:
    draft = output.draft
    attributes: dict[str, Any] = {
        Attribute.NUM_DRAFT_TOKENS: 0 if draft is None else len(draft.tree),
        Attribute.NUM_ACCEPTED: len(output.accepted),
        Attribute.NUM_EMITTED: len(output.tokens),
    }
    if output.drafter is not None:
        attributes |= _drafter(output.drafter)
    if draft is not None:
        attributes[Attribute.TREE_DEPTH] = draft.tree.depth
        attributes[Attribute.KV_BYTES] = draft.kv_bytes
        found = shares(output)
        attributes[Attribute.SOURCES] = [each.source or DRAFTER for each in found]
        attributes[Attribute.SOURCES_DRAFTED] = [each.drafted for each in found]
        attributes[Attribute.SOURCES_ACCEPTED] = [each.accepted for each in found]
    elif output.no_draft is not None:
        attributes[Attribute.NO_DRAFT] = output.no_draft.value
    return attributes


def _drafter(drafter: DrafterVersion) -> dict[str, Any]:
    return {
        Attribute.DRAFTER_NAME: drafter.name,
        Attribute.DRAFTER_VERSION: drafter.version,
        Attribute.DRAFTER_METHOD: drafter.method,
    }


def _ns(moment: float) -> int:
    """A time of time.perf_counter in nanoseconds."""
    return round(moment * 1e9)


def _wall_clock() -> int:
    """What makes a time of time.perf_counter one since 1970. Unit: nanoseconds.

    Times of one span and its children have to use the same value: each call gives another one.
    """
    return time_ns() - perf_counter_ns()
