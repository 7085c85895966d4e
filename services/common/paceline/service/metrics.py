"""Metrics of a server: registry, counter of calls, and the endpoint with its access rules."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from paceline.service import limits
from paceline.service.interceptor import OnEnd, bearer_token, https_context, token_matches
from paceline.service.options import OptionsError, ServerOptions
from paceline.telemetry.metrics import Metrics, Table

logger = logging.getLogger("paceline.service")
PATH = "/metrics"
_TABLE = Table("rpc_method", "code", "reason")
_CALLS = _TABLE.counter(
    "specdec_rpcs", "gRPC calls that ended; a Generate or Join stream is one call"
)


def new_registry() -> CollectorRegistry:
    """Return a registry with the memory, processor time and open files of this process."""
    # Without a `_created` series for each counter and histogram.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def count_calls(registry: CollectorRegistry) -> OnEnd:
    """Register the counter of ended calls; returns the function that increments it."""
    metrics = Metrics(registry, _TABLE)
    return lambda method, *end: metrics.add(_CALLS, 1, method.rpartition("/")[2], *end)


def serve_metrics(options: ServerOptions, registry: CollectorRegistry) -> MetricsEndpoint:
    """Serve a registry at `options.metrics_address`.

    TLS, client certificates and the token are required as for calls of the service, unless
    `options.insecure_metrics` is set. Raises OptionsError: the address cannot be listened on.
    """
    assert options.metrics_host_and_port is not None, "the options have no metrics address"
    secure = not options.insecure_metrics
    try:
        endpoint = MetricsEndpoint(
            *options.metrics_host_and_port,
            registry,
            options.token if secure else None,
            https_context(options) if secure else None,
        )
    except OSError as error:
        raise OptionsError(
            f"cannot serve metrics on {options.metrics_address}: {error.strerror or error}"
        ) from error
    logger.info("serving metrics", extra={"address": endpoint.address, "path": PATH})
    return endpoint


class MetricsEndpoint(ThreadingWSGIServer):
    """Serves a registry, whose collectors it calls, under `/metrics` on its own threads.

    The server of `prometheus_client`, with a token and without three weaknesses: there a connection
    that never finishes its TLS handshake blocks all others, one whose request never ends is never
    closed, and each has a thread. Here it is closed after a time, or when too many others came
    after it. The host is without brackets; port 0 takes any free one; readers must send the token,
    if there is one. Raises ``OSError`` if the address cannot be listened on.
    """

    # Without this, a second server on the same port would take half of the calls.
    allow_reuse_port = False

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        token: str | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        if tls is not None:
            # The handshake runs at the first read, on the thread of the connection.
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.set_app(_guarded(make_wsgi_app(registry), token))
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        host, port = self.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening; open connections may be cut."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection on a thread of its own."""
        with self._lock:
            self._open[request] = time.monotonic()
            oldest = list(self._open)[: -limits.METRICS_CONNECTIONS]
        self._end(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections whose time is over; called twice a second."""
        late = time.monotonic() - limits.METRICS_SECONDS
        with self._lock:
            ended = [request for request, began in self._open.items() if began < late]
        self._end(ended)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def _end(self, requests: Iterable[Any]) -> None:
        """Have the threads of connections end: what they wait for fails."""
        for request in requests:
            with self._lock:
                self._open.pop(request, None)
            with suppress(OSError):
                socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log broken connections and failed handshakes at level DEBUG only."""
        logger.debug("a metrics connection failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = limits.METRICS_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _guarded(metrics: Any, token: str | None) -> Callable[[Any, Any], Iterable[bytes]]:
    """Return a WSGI application behind its path and token."""

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", headers)
            return [f"metrics are at {PATH}\n".encode()]
        given = bearer_token([("authorization", environ.get("HTTP_AUTHORIZATION", ""))])
        if token is not None and not token_matches(given, token):
            start_response("401 Unauthorized", [*headers, ("WWW-Authenticate", "Bearer")])
            return [b"metrics need the token of this service: authorization: Bearer TOKEN\n"]
        answered: Iterable[bytes] = metrics(environ, start_response)
        return answered

    return answer
