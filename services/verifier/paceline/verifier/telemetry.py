"""Reports the engine's work as metrics and spans."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any

from paceline.telemetry.names import CREATE_CACHE, Attribute, Span
from paceline.telemetry.tracing import add_server_span, remote_context, start_named
from paceline.verifier.engine.job import Prefill
from paceline.verifier.engine.report import (
    DRAFTER,
    Draft,
    DraftCall,
    DrafterVersion,
    NoDraft,
    StepReport,
    TracedRounds,
    shares,
)
from paceline.verifier.store import Cache

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

    from paceline.verifier.metrics import VerifierMetrics


def add_round(
    tracer: Tracer, report: StepReport, trace: TracedRounds, facts: Mapping[str, Any]
) -> None:
    """Add the spans of a traced round of a text; ``facts`` are more attributes of it."""
    from opentelemetry.trace import SpanKind, set_span_in_context

    clock = _wall_clock()
    parent = remote_context(trace.traceparent)
    round_span = tracer.start_span(Span.ROUND, parent, start_time=clock + _ns(report.round_began))
    context = set_span_in_context(round_span)
    if (call := report.call) is not None:
        draft_span = start_named(
            tracer, Span.DRAFT, call.traceparent, context, SpanKind.CLIENT, clock + _ns(call.began)
        )
        draft_span.set_attributes(_call_attributes(call, report.draft))
        draft_span.end(clock + _ns(call.ended))
    verify_span = tracer.start_span(
        Span.VERIFY,
        context,
        attributes={
            Attribute.NUM_EMITTED: len(report.output.tokens),
            Attribute.QUEUE_DURATION: report.queue_us / 1e6,
            Attribute.COMPUTE_DURATION: report.step_us / 1e6,
            Attribute.BATCH_TOKENS: report.batch_tokens,
        },
        start_time=clock + _ns(report.began),
    )
    ended = clock + _ns(report.ended)
    verify_span.end(ended)
    round_span.set_attributes({**_round_attributes(report), **facts})
    round_span.end(ended)


def _call_attributes(call: DraftCall, draft: Draft | None) -> dict[str, Any]:
    """Return a draft span's attributes: without a tree it was late or empty, or it failed."""
    attributes: dict[str, Any] = {
        Attribute.DRAFTER_NAME: call.drafter,
        Attribute.DRAFT_CARRIER: call.carrier,
    }
    if call.kv_transport:
        attributes[Attribute.KV_TRANSPORT] = call.kv_transport
    if call.no_draft is not None or draft is None:
        return attributes | {Attribute.NO_DRAFT: (call.no_draft or NoDraft.EMPTY).value}
    return attributes | {
        **_drafter(draft.drafter),
        Attribute.NUM_DRAFT_TOKENS: len(draft.tree),
        Attribute.QUEUE_DURATION: draft.queue_us / 1e6,
        Attribute.COMPUTE_DURATION: draft.draft_us / 1e6,
        Attribute.KV_BYTES: draft.kv_bytes,
    }


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
        """Report to what there is; `rounds`: how many first ones of a text are traced,
        and n of each n-th after them."""
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

    def traced_rounds(self, traceparent: str) -> TracedRounds | None:
        """Return the rounds of a generation that have spans; None if it is not traced."""
        if self._tracer is None or remote_context(traceparent) is None:
            return None
        return TracedRounds(traceparent, *self._rounds)

    def answered(self, cache: Cache, report: StepReport, trace: TracedRounds | None) -> None:
        """Report a step, or consecutive plain ones, after its tokens were sent.

        `trace` is its generation's; None if it is not traced.
        """
        if self._metrics is not None:
            self._metrics.answered(cache, report)
        if self._tracer is None or trace is None:
            return
        cache.rounds += 1
        if report.traced:
            facts = {Attribute.ROUND_INDEX: cache.rounds, Attribute.CACHE_EPOCH: cache.epoch}
            add_round(self._tracer, report, trace, facts)

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


def _round_attributes(report: StepReport) -> dict[str, Any]:
    draft = report.draft
    attributes: dict[str, Any] = {
        Attribute.NUM_DRAFT_TOKENS: 0 if draft is None else len(draft.tree),
        Attribute.NUM_ACCEPTED: len(report.accepted),
        Attribute.NUM_EMITTED: len(report.output.tokens),
    }
    if report.drafter is not None:
        attributes |= _drafter(report.drafter)
    if draft is not None:
        attributes[Attribute.TREE_DEPTH] = draft.tree.depth
        attributes[Attribute.KV_BYTES] = draft.kv_bytes
        added = shares(report)
        attributes[Attribute.SOURCES] = [share.source or DRAFTER for share in added]
        attributes[Attribute.SOURCES_DRAFTED] = [share.drafted for share in added]
        attributes[Attribute.SOURCES_ACCEPTED] = [share.accepted for share in added]
    elif report.no_draft is not None:
        attributes[Attribute.NO_DRAFT] = report.no_draft.value
    return attributes


def _drafter(drafter: DrafterVersion) -> dict[str, Any]:
    return {
        Attribute.DRAFTER_NAME: drafter.name,
        Attribute.DRAFTER_VERSION: drafter.version,
        Attribute.DRAFTER_METHOD: drafter.method,
    }


def _ns(moment: float) -> int:
    """Return a time of time.perf_counter in nanoseconds."""
    return round(moment * 1e9)


def _wall_clock() -> int:
    """Return what makes a time of time.perf_counter one since 1970. Unit: nanoseconds.

    Times of one span and its children have to use the same value: each call gives another one.
    """
    return time_ns() - perf_counter_ns()
