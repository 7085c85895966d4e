"""Spans of OpenTelemetry's SDK, and how a trace continues in another process.

The sampler of the process decides which traces are recorded. Services start no trace: they add
spans to the trace that a caller names by a W3C traceparent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.telemetry.names import Attribute

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

Attributes = Mapping[str, "AttributeValue"]


def tracer() -> Tracer | None:
    """Makes the spans of this process; None where tracing is not set up.

    Set it up by `paceline.telemetry.exporters.traced`, or with a tracer provider of OpenTelemetry's
    SDK.
    """
    # A process that set up tracing has imported the SDK; no other process should load it.
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import Tracer

    found = trace.get_tracer_provider().get_tracer("paceline")
    # The SDK gives a tracer of another class where OTEL_SDK_DISABLED is set.
    return found if isinstance(found, Tracer) else None


def traceparent_of(span: Span) -> str:
    """The W3C traceparent that makes spans of another process children of this one."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    return headers.get("traceparent", "")


def current_metadata() -> tuple[tuple[str, str], ...]:
    """The current span as gRPC metadata, for calls whose messages have no traceparent.

    Empty where that span is not recorded or has ended.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry import trace

    span = trace.get_current_span()
    return (("traceparent", traceparent_of(span)),) if span.is_recording() else ()


@contextmanager
def continuing(headers: Mapping[str, str]) -> Iterator[None]:
    """Spans that begin in the body belong to the trace of an HTTP caller, if it sent one.

    Whether they are recorded is decided by the sampler, by default as the caller decided.
    """
    if tracer() is None:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    token = context.attach(propagator.extract(headers, context.get_current()))
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def server_span(
    tracer: Tracer, name: str, traceparent: str, attributes: Attributes
) -> Iterator[None]:
    """A service's span around the body, as the current span; none without a valid traceparent.

    An exception that leaves the body fails the span, a cancellation too.
    """
    span = _start(tracer, name, traceparent, attributes)
    if span is None:
        yield
        return
    from opentelemetry.trace import use_span

    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            fail(span, error)
            raise


def add_server_span(
    tracer: Tracer,
    name: str,
    traceparent: str,
    began_ns: int,
    attributes: Attributes,
    error: BaseException | None = None,
) -> None:
    """Add a service's span that ends now; none without a valid traceparent.

    Args:
        tracer: Of this process.
        name: One of `names.Span`.
        traceparent: As the caller sent it.
        began_ns: When the message arrived. Unit: nanoseconds since 1970.
        attributes: By `names.Attribute`.
        error: Why the work failed, if it did.
    """
    span = _start(tracer, name, traceparent, attributes, began_ns)
    if span is not None:
        if error is not None:
            fail(span, error)
        span.end()


def annotate(attributes: Attributes) -> None:
    """Add attributes to the current span."""
    from opentelemetry import trace

    trace.get_current_span().set_attributes(attributes)


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import StatusCode

    reason = getattr(error, "reason", None)
    span.set_attribute(Attribute.ERROR_TYPE, reason or type(error).__name__)
    span.set_status(StatusCode.ERROR, str(error))


def _start(
    tracer: Tracer,
    name: str,
    traceparent: str,
    attributes: Attributes,
    began_ns: int | None = None,
) -> Span | None:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return None
    return tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes, start_time=began_ns)
