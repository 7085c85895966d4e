"""Metrics over HTTP, for Prometheus to scrape."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

logger = logging.getLogger("paceline.telemetry")

PATH = "/metrics"
CALLER_SECONDS = 10.0
"""A connection that is idle for so long is closed."""


class MetricsEndpoint:
    """Serves a registry under `/metrics` on its own threads.

    Args:
        host: to listen on, without brackets.
        port: 0 takes any free one.
        registry: what to serve. Its collectors are called on a thread of the endpoint.
        authorized: whether to answer a request with that `authorization` header; else with 401.
        tls: for HTTPS; None: plain HTTP.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        authorized: Callable[[str], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._server = _Server(host, port, tls)
        self._server.set_app(_application(registry, authorized))
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Stop listening; open connections may be cut."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _application(
    registry: CollectorRegistry, authorized: Callable[[str], bool]
) -> Callable[[Any, Any], Iterable[bytes]]:
    """A WSGI application."""
    metrics = make_wsgi_app(registry)

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", headers)
            return [f"metrics are at {PATH}\n".encode()]
        if not authorized(environ.get("HTTP_AUTHORIZATION", "")):
            start_response("401 Unauthorized", [*headers, ("WWW-Authenticate", "Bearer")])
            return [b"metrics need the token of this service: authorization: Bearer TOKEN\n"]
        answered: Iterable[bytes] = metrics(environ, start_response)
        return answered

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # Without this, a second server on the same port would take half of the calls.
    allow_reuse_port = False

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        if tls is not None:
            # The handshake runs at the first read, on the thread of the connection.
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log broken connections and failed handshakes at level DEBUG only."""
        logger.debug("a metrics connection failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = CALLER_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
