"""Reports the engine's work as metrics and spans."""

from __future__ import annotations

from functools import partial
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from paceline.telemetry.names import Attribute, Span
from paceline.telemetry.tracing import add_server_span, remote_context, traceparent_of
from paceline.verifier.cache import Cache
from paceline.verifier.engine.job import Draft, Prefill, StepOutput

if TYPE_CHECKING:
    from opentelemetry import context, trace
    from opentelemetry.sdk.trace import Tracer

    from paceline.verifier.engine.drafting import SequenceAtDrafter
    from paceline.verifier.metrics import VerifierMetrics


class OpenSpans:
    """The spans of a round that was drafted for, and what its drafter answered."""

    __slots__ = ("draft", "round")

    def __init__(self, round_: trace.Span, draft: trace.Span) -> None:
        self.round = round_
        self.draft = draft


class RoundSpans:
    """Begins the spans of a generation's drafted rounds. Only the engine thread uses it.

    The span of a draft has to begin when the tree is requested, since the drafter's span is its
    child. All other spans are made when the step is reported (:meth:`Telemetry.answered`).

    Attributes:
        traceparent: Of the generation's span.
        parent: The same, parsed once; any thread may read it.
    """

    def __init__(self, tracer: Tracer, traceparent: str, parent: context.Context) -> None:
        self.traceparent = traceparent
        self._tracer = tracer
        self.parent = parent
        self._open: OpenSpans | None = None

    def begin_draft(self, round_began: float) -> str:
        """Begin the spans of a round and its draft.

        Args:
            round_began: When the round began (time.perf_counter).

        Returns:
            The traceparent of the draft.
        """
        from opentelemetry.trace import set_span_in_context

        began = self._tracer.start_span(Span.ROUND, self.parent, start_time=_ns(round_began))
        draft = self._tracer.start_span(Span.DRAFT, set_span_in_context(began))
        self._open = OpenSpans(began, draft)
        return traceparent_of(draft)

    def end_draft(self, draft: Draft | None, sequence: SequenceAtDrafter | None) -> None:
        """End the span of the draft; without a tree it was late, empty, or the drafter failed."""
        if self._open is None:
            return
        span = self._open.draft
        if sequence is not None:
            span.set_attribute(Attribute.DRAFTER_NAME, sequence.name)
            span.set_attribute(Attribute.DRAFT_CARRIER, sequence.link.carrier_name)
            if sequence.opened is not None:
                transport = sequence.opened.kv_transport or "none"
                span.set_attribute(Attribute.KV_TRANSPORT, transport)
        if draft is not None:
            span.set_attributes(
                {
                    Attribute.DRAFTER_VERSION: draft.drafter.rpartition("@")[2],
                    Attribute.NUM_DRAFT_TOKENS: len(draft.tree),
                    Attribute.QUEUE_US: draft.queue_us,
                    Attribute.COMPUTE_US: draft.draft_us,
                    Attribute.KV_BYTES: draft.kv_bytes,
                }
            )
        span.end()

    def close(self) -> None:
        """End the spans of a round that will have no step."""
        spans = self.take()
        if spans is not None:
            for span in (spans.draft, spans.round):
                if span.is_recording():  # it has not ended
                    span.end()

    def take(self) -> OpenSpans | None:
        """The spans of the round that its step ends; None: it was not drafted for."""
        spans, self._open = self._open, None
        return spans


class Telemetry:
    """Reports jobs to metrics and a tracer, as far as the verifier has them.

    Used on the event loop.
    """

    def __init__(self, metrics: VerifierMetrics | None, tracer: Tracer | None) -> None:
        self._metrics = metrics
        self._tracer = tracer

    def admitted(self, cache: Cache) -> None:
        """Report the start of a generation."""
        if self._metrics is not None:
            self._metrics.admitted(cache)

    def report_prefill(self, cache: Cache, job: Prefill, traceparent: str) -> None:
        """Report a prefill once it is done; `traceparent` is its caller's."""
        if self._metrics is not None or self._tracer is not None:
            job.on_done = partial(self._prefilled, cache, job, traceparent, time_ns())

    def round_spans(self, traceparent: str) -> RoundSpans | None:
        """Spans for a generation; None: it is not traced."""
        if self._tracer is None:
            return None
        parent = remote_context(traceparent)
        return None if parent is None else RoundSpans(self._tracer, traceparent, parent)

    def answered(self, cache: Cache, output: StepOutput, spans: RoundSpans | None) -> None:
        """Report a step, or consecutive plain ones, after its tokens were sent.

        `spans` are its generation's; None: it is not traced.
        """
        if self._metrics is not None:
            self._metrics.answered(cache, output)
        if self._tracer is None or spans is None:
            return
        from opentelemetry.trace import set_span_in_context

        began = _ns(output.round_began)
        if output.spans is not None:
            span = output.spans.round
        else:
            span = self._tracer.start_span(Span.ROUND, spans.parent, start_time=began)
        verify = self._tracer.start_span(
            Span.VERIFY,
            set_span_in_context(span),
            attributes={
                Attribute.NUM_EMITTED: len(output.tokens),
                Attribute.QUEUE_US: output.queue_us,
                Attribute.COMPUTE_US: output.step_us,
                Attribute.BATCH_TOKENS: output.batch_tokens,
            },
            start_time=_ns(output.began),
        )
        verify.end(_ns(output.ended))
        span.set_attributes(_round_attributes(cache, output))
        span.end(_ns(output.ended))

    def _prefilled(self, cache: Cache, job: Prefill, traceparent: str, began_ns: int) -> None:
        if self._metrics is not None:
            self._metrics.prefilled(cache, job)
        if self._tracer is not None and traceparent:
            attributes = {
                Attribute.INPUT_TOKENS: job.total,
                Attribute.REUSED_TOKENS: job.reused,
                Attribute.QUEUE_US: job.queue_us,
                Attribute.COMPUTE_US: job.step_us,
                Attribute.CACHE_GENERATION: cache.epoch,
            }
            name = Span.VERIFIER_PREFILL
            add_server_span(self._tracer, name, traceparent, began_ns, attributes, job.error)


def _round_attributes(cache: Cache, output: StepOutput) -> dict[str, Any]:
    cache.rounds += 1
    draft = output.draft
    attributes: dict[str, Any] = {
        Attribute.ROUND_INDEX: cache.rounds,
        Attribute.NUM_DRAFT_TOKENS: 0 if draft is None else len(draft.tree),
        Attribute.NUM_ACCEPTED: len(output.accepted),
        Attribute.NUM_EMITTED: len(output.tokens),
        Attribute.CACHE_GENERATION: cache.epoch,
    }
    if draft is not None:
        attributes[Attribute.TREE_DEPTH] = draft.tree.depth
        attributes[Attribute.DRAFTER_VERSION] = draft.drafter.rpartition("@")[2]
        attributes[Attribute.KV_BYTES] = draft.kv_bytes
    elif output.no_draft is not None:
        attributes[Attribute.NO_DRAFT] = output.no_draft.value
    return attributes


def _ns(moment: float) -> int:
    """A time of time.perf_counter as nanoseconds since 1970."""
    return time_ns() - round((perf_counter() - moment) * 1e9)
