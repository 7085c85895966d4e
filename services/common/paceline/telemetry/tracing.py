"""Spans: whether anyone wants them, and how a trace goes on in another process.

The sampling decision is made once, where a generation begins. A service adds spans only for a
caller that says, by a sampled W3C traceparent, that its trace is being recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Tracer
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

Attributes = Mapping[str, "AttributeValue"]


def tracer() -> Tracer | None:
    """Makes the spans of this process; None where nobody set up tracing.

    Set it up by `paceline.telemetry.exporters.traced`, or with a tracer provider of OpenTelemetry's
    SDK. Each call gives another tracer.
    """
    # Whoever set up tracing has imported it; nobody else shall wait for that.
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import Tracer

    found = trace.get_tracer_provider().get_tracer("paceline")
    # The SDK gives none where OTEL_SDK_DISABLED says so.
    return found if isinstance(found, Tracer) else None


def traceparent_of(span: Span) -> str:
    """What makes spans elsewhere children of this one."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def current_metadata() -> tuple[tuple[str, str], ...]:
    """The current span as gRPC metadata, for calls that carry no traceparent in their messages."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry import trace

    span = trace.get_current_span()
    return (("traceparent", traceparent_of(span)),) if span.is_recording() else ()


def remote_parent(traceparent: str, *, remote: bool = True) -> Context | None:
    """The caller's span as a parent; None where it is malformed or not recorded.

    With `remote` false it is taken for a span of this process.
    """
    if not traceparent:
        return None
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    parent = trace.get_current_span(context).get_span_context()
    if not (parent.is_valid and parent.trace_flags.sampled):
        return None
    if remote:
        return context
    local = trace.SpanContext(parent.trace_id, parent.span_id, False, parent.trace_flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(local))


@contextmanager
def continuing(headers: Mapping[str, str]) -> Iterator[None]:
    """What begins in the body goes on with the trace of a caller over HTTP, if there is one.

    Whether it is recorded is for the sampler to say, which as a rule does as the caller did.
    """
    if tracer() is None or "traceparent" not in headers:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def server_span(
    tracer: Tracer, name: str, traceparent: str, attributes: Attributes
) -> Iterator[None]:
    """A service's span around the body, and its current one; nothing without a recording caller.

    An exception that leaves the body fails the span, a cancellation too.
    """
    parent = remote_parent(traceparent)
    if parent is None:
        yield
        return
    from opentelemetry import trace

    span = tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes)
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()


def annotate(attributes: Attributes) -> None:
    """Add to the current span."""
    from opentelemetry import trace

    trace.get_current_span().set_attributes(attributes)


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import StatusCode

    from paceline.telemetry.names import Attribute

    reason = getattr(error, "reason", None)
    span.set_attribute(Attribute.ERROR_TYPE, reason or type(error).__name__)
    span.set_status(StatusCode.ERROR, str(error))
