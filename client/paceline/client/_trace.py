"""Spans of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.telemetry.names import CREATE_CACHE, PROVIDER, Attribute, Span
from paceline.telemetry.tracing import fail, server_attributes, traceparent_of, tracer
from paceline.v1 import verifier_pb2

from ._options import GenerationOptions
from ._stats import Stats, Usage

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import Tracer

_Values = Mapping[str, Any]


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
        """Starts the span of the generation, an `operation`, as a child of the current one.

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
        """Sets the name of the model."""
        self._root.update_name(f"{self._operation} {model}")
        self._root.set_attributes({Attribute.REQUEST_MODEL: model, Attribute.RESPONSE_MODEL: model})

    def begin_prefill(self, address: str) -> str:
        """Starts the span of a prefill; returns the traceparent for the verifier.

        Args:
            address: Address of the verifier.
        """
        from opentelemetry import trace

        parent = trace.set_span_in_context(self._root)
        server = server_attributes(address)
        self._prefill = self._tracer.start_span(
            Span.PREFILL, parent, trace.SpanKind.CLIENT, {**CREATE_CACHE, **server}
        )
        self._root.set_attributes(server)
        return traceparent_of(self._prefill)

    def end_prefill(self, outcome: verifier_pb2.CacheCreated | BaseException | None) -> None:
        """Ends the prefill's span, if one is open, with the created cache or an error."""
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
        """Ends all spans; `error` is the exception of a failed generation."""
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
