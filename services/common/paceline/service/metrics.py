"""Metrics of a server: registry, counter of calls, and the endpoint with its access rules."""

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
    """A registry with the memory, processor time and open files of this process."""
    # Without a `_created` series for each counter and histogram.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def count_calls(registry: CollectorRegistry) -> OnEnd:
    """Register the counter of ended calls; returns the function that increments it."""
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

    TLS, client certificates and the token are required as for calls of the service, unless
    `options.insecure_metrics` is set.

    Raises:
        OptionsError: The address cannot be listened on.
    """
    assert options.metrics_host_and_port is not None, "the options have no metrics address"
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
