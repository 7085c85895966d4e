"""Spans of calls with one request and one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from paceline.service.errors import ServiceError
from paceline.telemetry.names import Attribute
from paceline.telemetry.tracing import annotate, server_span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

Call = Callable[[Any, Any], Awaitable[Any]]


def traced_call(tracer: Tracer, method: str, call: Call) -> Call:
    """A handler of `method` ("/package.Service/Method") that makes a span of each traced call."""
    service, _, name = method.removeprefix("/").rpartition("/")
    attributes = {
        Attribute.RPC_SYSTEM: "grpc",
        Attribute.RPC_SERVICE: service,
        Attribute.RPC_METHOD: name,
    }

    async def traced(request: Any, context: Any) -> Any:
        traceparent = dict(context.invocation_metadata() or ()).get("traceparent", "")
        with server_span(tracer, f"{service}/{name}", str(traceparent), attributes):
            try:
                return await call(request, context)
            except ServiceError as error:
                annotate({Attribute.RPC_STATUS: error.code.value[0]})
                raise

    return traced
