"""Where spans go: told by OpenTelemetry's own environment variables, read where a process begins.

Nothing about telemetry may keep a process from its work: what cannot be set up is warned about.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger("paceline.telemetry")

FLUSH_SECONDS = 3.0
"""How long the end of a process waits for spans on their way."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def traced(service: str) -> Iterator[None]:
    """Export the spans of the body, if the environment asks for it; for the main of a process.

    - `OTEL_TRACES_EXPORTER`: otlp, console (JSON on standard error), none, or several with commas.
      Without it: otlp where an endpoint is named, else none.
    - `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_PROTOCOL` (grpc or http/protobuf), and all
      others that OpenTelemetry's SDK reads: headers, sampler, batch sizes, resource attributes.
    - `OTEL_SERVICE_NAME`: instead of `service`.
    """
    provider = _provider(service, _wanted(os.environ))
    if provider is None:
        yield
        return
    from opentelemetry import trace

    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        Recorder.flush_all()
        _shut_down(provider)


def _wanted(environ: Mapping[str, str]) -> list[str]:
    """Names of exporters."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    default = "otlp" if any(environ.get(name) for name in _ENDPOINTS) else "none"
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip() or default
    names = [name.strip().lower() for name in named.split(",")]
    return [name for name in names if name not in ("", "none")]


def _provider(service: str, wanted: list[str]) -> TracerProvider | None:
    """A provider with all exporters that could be made; None if there is none."""
    if not wanted:
        return None
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
    exporters = [exporter for name in wanted if (exporter := _exporter(name)) is not None]
    if not exporters:
        return None
    # What the environment says goes over what we say.
    resource = Resource.create({"service.name": service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(name: str) -> SpanExporter | None:
    try:
        if name == "console":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter(out=sys.stderr)
        if name == "otlp":
            return _otlp()
    except Exception as error:
        logger.warning("no traces are exported to %s: %s", name, error)
        return None
    logger.warning("OTEL_TRACES_EXPORTER: %r is none of otlp, console, none", name)
    return None


def _otlp() -> SpanExporter:
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter()
    raise ValueError(f"the protocol is {protocol!r}, expected 'grpc' or 'http/protobuf'")


def _shut_down(provider: TracerProvider) -> None:
    """Send what is left, but do not wait long for a collector that is not there."""
    ending = threading.Thread(target=provider.shutdown, name="telemetry-shutdown", daemon=True)
    ending.start()
    ending.join(FLUSH_SECONDS)
