"""Reports the drafter's work as metrics and spans."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.drafter.registry import Version
from paceline.drafter.session import Session
from paceline.drafter.worker import Drafted
from paceline.telemetry.names import Attribute, Span
from paceline.telemetry.tracing import Attributes, add_server_span, annotate, server_span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer

    from paceline.drafter.metrics import DrafterMetrics


class Telemetry:
    """Metrics and spans of Draft streams; either may be None. Use it on one event loop."""

    def __init__(self, metrics: DrafterMetrics | None, tracer: Tracer | None) -> None:
        self._metrics = metrics
        self._tracer = tracer

    @contextmanager
    def attaching(self, version: Version, traceparent: str) -> Iterator[None]:
        """Span around attaching a generation; calls to the verifier are its children."""
        if self._tracer is None:
            yield
            return
        attributes = {
            Attribute.DRAFTER_NAME: version.spec.name,
            Attribute.DRAFTER_VERSION: version.version,
            Attribute.DRAFTER_METHOD: version.spec.method,
        }
        with server_span(self._tracer, Span.DRAFTER_ATTACH, traceparent, attributes):
            yield

    def attached(self, session: Session) -> None:
        """A session was opened. Call it inside `attaching`."""
        if self._metrics is not None:
            self._metrics.attached(session)
        if self._tracer is not None:
            annotate(
                {
                    Attribute.KV_TRANSPORT: session.kv_transport or "none",
                    Attribute.KV_BYTES: session.mapped_bytes,
                }
            )

    def detached(self, session: Session) -> None:
        """A session was closed."""
        if self._metrics is not None:
            self._metrics.detached(session)

    def drafted(self, version: Version, drafted: Drafted, traceparent: str, arrived: float) -> None:
        """A round that arrived at ``arrived`` (time.monotonic) was answered."""
        if self._metrics is not None:
            self._metrics.drafted(version, drafted)
        if self._tracer is not None and traceparent:
            began = time.time_ns() - round((time.monotonic() - arrived) * 1e9)
            attributes: Attributes = {
                Attribute.DRAFTER_VERSION: version.version,
                Attribute.NUM_DRAFT_TOKENS: len(drafted.tree.tokens),
                Attribute.QUEUE_US: round(drafted.queue_seconds * 1e6),
                Attribute.COMPUTE_US: round(drafted.draft_seconds * 1e6),
            }
            add_server_span(self._tracer, Span.DRAFTER_ROUND, traceparent, began, attributes)
