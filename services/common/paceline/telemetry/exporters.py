"""Export of spans, set up by OpenTelemetry's environment variables.

Telemetry never stops a process: errors of its setup are logged as warnings.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from paceline.telemetry.names import Attribute

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger("paceline.telemetry")
FLUSH_SECONDS = 3.0  # how long the end of a process waits for the export of its last spans
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def traced(service: str) -> Iterator[None]:
    """Export the spans of the body, if the environment enables it; for the main of a process.

    - `OTEL_TRACES_EXPORTER`: otlp, console (JSON on standard error), none, or several with commas.
      Default: otlp if an endpoint is set, else none.
    - `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_PROTOCOL` (grpc or http/protobuf), and all
      others that OpenTelemetry's SDK reads: headers, sampler, batch sizes, resource attributes.
    - `OTEL_SERVICE_NAME`: instead of `service`; `OTEL_RESOURCE_ATTRIBUTES` adds others.
    """
    names = _exporter_names(os.environ)
    provider = _provider(service, names) if names else None
    if provider is None:
        yield
        return
    from opentelemetry import trace

    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        # In a thread: the SDK waits longer than FLUSH_SECONDS for an unreachable collector.
        ending = threading.Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)


def _exporter_names(environ: Mapping[str, str]) -> list[str]:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    default = "otlp" if any(environ.get(name) for name in _ENDPOINTS) else "none"
    chosen = environ.get("OTEL_TRACES_EXPORTER", "").strip() or default
    names = [name.strip().lower() for name in chosen.split(",")]
    return [name for name in names if name not in ("", "none")]


def _provider(service: str, names: list[str]) -> TracerProvider | None:
    """Return a provider with every exporter that could be made; None if there is none."""
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        logger.warning(
            "no traces are exported: %s is not installed; pip install 'paceline[telemetry]'",
            error.name,
        )
        return None
    facts: dict[str, AttributeValue] = {
        Attribute.SERVICE_NAME: service,
        Attribute.SERVICE_VERSION: version("paceline"),
        Attribute.HOST_NAME: socket.gethostname(),
    }
    # The environment takes precedence.
    resource = Resource.create(facts).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporting = False
    for name in names:
        try:
            provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
            exporting = True
        except Exception as error:
            logger.warning("no traces are exported to %s: %s", name, error)
    return provider if exporting else None


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if name != "otlp":
        raise ValueError("OTEL_TRACES_EXPORTER must be otlp, console or none")
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter()
    raise ValueError(f"the protocol is {protocol!r}, expected 'grpc' or 'http/protobuf'")
