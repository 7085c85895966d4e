"""Options of the gateway."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.service.options import (
    OptionsError,
    ServerOptions,
    byte_count,
    option,
    socket_path_of,
    stays_on_this_machine,
)


@dataclass(frozen=True)
class GatewayOptions:
    """Options of one gateway, checked when created. Raises OptionsError if they contradict each
    other, or would serve beyond this machine without TLS and a key."""

    address: str = option(
        "127.0.0.1:8080",
        "where to listen: host:port (port 0: any free one), [v6]:port or unix:/path",
        metavar="HOST:PORT",
    )
    tls_cert: Path | None = option(
        None, "PEM certificate chain, to serve HTTPS", flag="http_tls_cert", metavar="PEM"
    )
    tls_key: Path | None = option(
        None, "PEM private key of --http-tls-cert", flag="http_tls_key", metavar="PEM"
    )
    api_key: str | None = None
    """Bearer token that every call but health must carry; None: no authentication."""
    insecure: bool = option(
        False, "listen beyond this machine without TLS or key: behind a proxy that has both"
    )
    model_name: str | None = option(
        None, "model name in requests (default: the name from the verifier)", metavar="NAME"
    )
    chat_template: str | None = None  # Jinja template; None: the tokenizer's
    max_body_bytes: int = option(
        4 << 20,
        "longest request body, such as 512KiB (default: 4MiB)",
        flag="max_body",
        type=byte_count,
        metavar="SIZE",
    )
    max_requests: int = option(256, "requests in flight; more get HTTP 429", metavar="N")
    strict: bool = option(
        False,
        "refuse what is else ignored with a warning in a header, and limits of new tokens that the "
        "context has no room for",
    )
    cors_origins: Sequence[str] = option(
        (),
        "origin of pages that may send requests from a browser, or * (can be repeated)",
        flag="cors_origin",
        type=str,
        action="append",
        metavar="ORIGIN",
    )
    allowed_hosts: Sequence[str] = option(
        (),
        "name under which requests may come besides localhost, 127.0.0.1 and [::1], which are all "
        "on loopback without a key (can be repeated)",
        flag="allowed_host",
        type=str,
        action="append",
        metavar="HOST",
    )
    access_log: bool = option(True, "log no line for each request")
    keep_alive_seconds: float = option(
        10.0, "time without a token after which a stream gets a comment", metavar="S"
    )
    drain_seconds: float = option(
        30.0, "how long requests in flight may continue after SIGTERM", metavar="S"
    )
    metrics_address: str | None = option(
        None,
        "serve metrics for Prometheus at this address, under /metrics (default: none)",
        metavar="HOST:PORT",
    )
    insecure_metrics: bool = option(
        False, "serve metrics to everyone who reaches --metrics-address, without TLS and key"
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionsError("TLS needs both --http-tls-cert and --http-tls-key")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise OptionsError(
                "the API key is empty or has characters that are invalid in HTTP headers"
            )
        if self.max_body_bytes < 1024:
            raise OptionsError("max_body_bytes must be at least 1 KiB")
        if self.max_requests < 1:
            raise OptionsError("max_requests must be at least one")
        if not 0 <= self.drain_seconds < float("inf"):
            raise OptionsError("the drain time must be a finite number of seconds, 0 or more")
        if not self.keep_alive_seconds > 0:
            raise OptionsError("keep_alive_seconds must be positive")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise OptionsError(f"{origin} is no origin: give one such as https://example.org")
        for host in self.allowed_hosts:
            if not re.fullmatch(r"[^/:\s]+|\[[0-9A-Fa-f:.]+\]", host):
                raise OptionsError(f"{host} is no host: give a name without scheme and port")
        self.metrics  # noqa: B018 - checks the options of metrics
        secured = self.tls_cert is not None and self.api_key is not None
        if not (secured or self.insecure or stays_on_this_machine(self.address)):
            raise OptionsError(
                f"refusing to listen on {self.address} without TLS and a key: give "
                "--http-tls-cert, --http-tls-key and --api-key-file, listen on 127.0.0.1 or "
                "unix:/path, or give --insecure if a proxy in front of it has both"
            )

    @property
    def hosts(self) -> frozenset[str] | None:
        """Host names under which requests may come; None: any.

        A page whose name resolves to this machine comes under that name, and with no key nothing
        else tells it from the user's own programs.
        """
        local = self.api_key is None and stays_on_this_machine(self.address)
        if socket_path_of(self.address) is not None or not (local or self.allowed_hosts):
            return None  # no page reaches a Unix socket
        name = self.address.rpartition(":")[0]
        return frozenset(
            host.lower() for host in ("localhost", "127.0.0.1", "[::1]", name, *self.allowed_hosts)
        )

    @property
    def metrics(self) -> ServerOptions:
        """Options of the metrics endpoint, with the API key as its token. Raises OptionsError if
        metrics would be served beyond this machine without TLS and a key."""
        return ServerOptions(
            address="127.0.0.1:0",  # unused
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            token=self.api_key,
            metrics_address=self.metrics_address,
            insecure_metrics=self.insecure_metrics,
        )
