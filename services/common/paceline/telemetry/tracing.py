"""Spans of OpenTelemetry's SDK, and propagation of traces between processes.

The sampler of the process decides which traces are recorded. Services start no trace: they add
spans to the trace of a caller's W3C traceparent.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from http import HTTPMethod
from typing import TYPE_CHECKING

from paceline.telemetry.names import SCHEMA_URL, Attribute

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Tracer
    from opentelemetry.trace import Span, SpanKind
    from opentelemetry.util.types import AttributeValue

Attributes = Mapping[str, "AttributeValue"]


def tracer() -> Tracer | None:
    """Return the tracer of this process; None if tracing is not set up.

    `paceline.telemetry.exporters.traced` or a tracer provider of OpenTelemetry's SDK sets it up.
    """
    # A process that set up tracing has imported the SDK; other processes do not load it here.
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import Tracer

    current = trace.get_tracer_provider().get_tracer("paceline", schema_url=SCHEMA_URL)
    # With OTEL_SDK_DISABLED the SDK returns a tracer of another class.
    return current if isinstance(current, Tracer) else None


def traceparent_of(span: Span) -> str:
    """Return the W3C traceparent of a span, which makes spans of another process its children."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    return headers.get("traceparent", "")


def current_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current span as gRPC metadata, for calls whose messages have no traceparent.

    Empty if that span is not recorded or has ended.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry import trace

    span = trace.get_current_span()
    return (("traceparent", traceparent_of(span)),) if span.is_recording() else ()


@contextmanager
def http_span(
    method: str, route: str, headers: Mapping[str, str], attributes: Attributes
) -> Iterator[Span | None]:
    """The span of an HTTP request around the body, as the current span; None without tracing.

    It joins the trace in the request's headers, or begins one. The sampler decides whether it is
    recorded, by default as the caller did. A method that HTTP does not define becomes `_OTHER`;
    `route` is a path template, such as "/v1/models/{name}".
    """
    source = tracer()
    if source is None:
        yield None
        return
    from opentelemetry import context
    from opentelemetry.trace import SpanKind, use_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(headers, context.get_current())
    known = method in HTTPMethod.__members__
    span = source.start_span(
        f"{method if known else 'HTTP'} {route}",
        parent,
        SpanKind.SERVER,
        {
            Attribute.HTTP_METHOD: method if known else "_OTHER",
            Attribute.HTTP_ROUTE: route,
            **attributes,
        },
    )
    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        yield span


@contextmanager
def server_span(
    tracer: Tracer, name: str, traceparent: str, attributes: Attributes
) -> Iterator[None]:
    """A service's span around the body, as the current span; none without a valid traceparent.

    An exception or cancellation in the body sets the span's status to ERROR.
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
    ended_ns: int | None,
    attributes: Attributes,
    error: BaseException | None = None,
) -> None:
    """Add a service's span that has ended, with an error if its work failed; none without a valid
    traceparent.

    It began when the message arrived, and ended when the answer was sent; None: now. A span that
    ends later would outlast its parent, which ends with the answer. Unit: nanoseconds since 1970.
    """
    span = _start(tracer, name, traceparent, attributes, began_ns)
    if span is not None:
        if error is not None:
            fail(span, error)
        span.end(ended_ns)


def remote_context(traceparent: str) -> Context | None:
    """Return the context of a caller's span, as the parent of others; None if there is none."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    return parent if trace.get_current_span(parent).get_span_context().is_valid else None


def child_traceparent(traceparent: str) -> str:
    """Return the traceparent of a span that is to be made later, by :func:`start_named`, in the
    trace of a valid one. Another process may make children of it before."""
    version, trace, _, flags = traceparent.split("-")[:4]
    return f"{version}-{trace}-{random.getrandbits(64) or 1:016x}-{flags}"


def start_named(
    tracer: Tracer, name: str, traceparent: str, parent: Context, kind: SpanKind, began_ns: int
) -> Span:
    """Start the span of a :func:`child_traceparent`."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Named(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return int(traceparent.split("-")[2], 16)

    named = copy(tracer)  # other threads use it meanwhile
    named.id_generator = Named()
    return named.start_span(name, parent, kind, start_time=began_ns)


def server_attributes(address: str) -> Attributes:
    """Return the attributes of a server's address, "host:port" or "unix:/path"."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        return {Attribute.SERVER_ADDRESS: host.strip("[]"), Attribute.SERVER_PORT: int(port)}
    return {Attribute.SERVER_ADDRESS: address} if address else {}


def annotate(attributes: Attributes) -> None:
    """Add attributes to the current span."""
    from opentelemetry import trace

    trace.get_current_span().set_attributes(attributes)


def fail(span: Span, error: BaseException) -> None:
    """Set the status of a span to ERROR, with the error's reason or type."""
    from opentelemetry.trace import StatusCode

    reason = getattr(error, "reason", None)
    span.set_attribute(Attribute.ERROR_TYPE, reason or type(error).__name__)
    span.set_status(StatusCode.ERROR, str(error))


def _start(
    tracer: Tracer, name: str, traceparent: str, attributes: Attributes, began_ns: int | None = None
) -> Span | None:
    parent = remote_context(traceparent)
    if parent is None:
        return None
    from opentelemetry.trace import SpanKind

    return tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=began_ns)
