"""Metrics over HTTP, for Prometheus to scrape."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

logger = logging.getLogger("paceline.telemetry")

PATH = "/metrics"
CALLER_SECONDS = 10.0
"""A caller that sends or takes nothing for so long is hung up on."""


class MetricsEndpoint:
    """Serves a registry under `/metrics` from threads of its own, beside the event loop.

    Args:
        host: to listen on, without brackets.
        port: 0 takes any free one.
        registry: what to serve. Its collectors are called on a thread of the endpoint.
        authorized: whether a request with that `authorization` header may read; else it gets 401.
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
        self._server = _Server(host, port, registry, authorized, tls)
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
        """Stop listening. Answers under way may end or not."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A second server on the same port must fail, not take half of the calls.
    allow_reuse_port = False

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        authorized: Callable[[str], bool],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.registry = registry
        self.authorized = authorized
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        if tls is not None:
            # The handshake waits for the first read, on the caller's own thread.
            self.socket = tls.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that breaks off, or speaks no TLS, is no event."""
        logger.debug("a metrics caller broke off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CALLER_SECONDS
    server_version = "paceline"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.path.partition("?")[0] != PATH:
            self._refuse(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}")
        elif not self.server.authorized(self.headers.get("authorization", "")):
            self._refuse(
                HTTPStatus.UNAUTHORIZED,
                "metrics need the token of this service: authorization: Bearer TOKEN",
            )
        else:
            encode, kind = choose_encoder(self.headers.get("accept", ""))
            self._answer(HTTPStatus.OK, encode(self.server.registry), kind)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, f"{why}\n".encode(), "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
