"""Metrics of a server: their registry, the calls it answered, and who may read them."""

from __future__ import annotations

import logging

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, ProcessCollector

from paceline.service.credentials import https_context
from paceline.service.identity import bearer_token, token_matches
from paceline.service.interceptor import OnEnd
from paceline.service.options import OptionsError, ServerOptions
from paceline.telemetry.endpoint import PATH, MetricsEndpoint
from paceline.telemetry.names import Metric

logger = logging.getLogger("paceline.service")


def new_registry() -> CollectorRegistry:
    """A registry that holds the memory, processor time and open files of this process."""
    # Not a series more for each counter and histogram, only to say when it began.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def count_calls(registry: CollectorRegistry) -> OnEnd:
    """What counts the calls of a server that ended, by method, status code and reason."""
    rpcs = Counter(
        Metric.RPCS,
        "gRPC calls that ended; a Verify or Draft stream is one call",
        ("rpc_method", "code", "reason"),
        registry=registry,
    )

    def count(method: str, code: str, reason: str) -> None:
        rpcs.labels(method.rpartition("/")[2], code, reason).inc()

    return count


def serve_metrics(options: ServerOptions, registry: CollectorRegistry) -> MetricsEndpoint:
    """Serve a registry at `options.metrics_address`.

    Whoever reads must do what callers of the service must: speak its TLS, show a certificate where
    it asks for one, and its token; with `options.insecure_metrics` nothing of it.

    Raises:
        OptionsError: The address cannot be listened on.
    """
    assert options.metrics_host_and_port is not None, "no address to serve metrics at"
    host, port = options.metrics_host_and_port
    token = None if options.insecure_metrics else options.token

    def authorized(header: str) -> bool:
        return token is None or token_matches(bearer_token([("authorization", header)]), token)

    try:
        endpoint = MetricsEndpoint(
            host,
            port,
            registry,
            authorized=authorized,
            tls=None if options.insecure_metrics else https_context(options),
        )
    except OSError as error:
        raise OptionsError(
            f"cannot serve metrics on {options.metrics_address}: {error.strerror or error}"
        ) from error
    logger.info("serving metrics", extra={"address": endpoint.address, "path": PATH})
    return endpoint
