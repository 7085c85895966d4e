"""Options of the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from paceline.service.options import OptionsError, ServerOptions, stays_on_this_machine

from .keys import ApiKey


@dataclass(frozen=True)
class GatewayOptions:
    """Options of one gateway, checked when created.

    Raises:
        OptionsError: They contradict each other, or would serve beyond this machine without TLS
            and a key.
    """

    address: str = "127.0.0.1:8080"
    """`host:port` (port 0: any free one), `[v6]:port` or `unix:/path`."""
    tls_cert: Path | None = None
    """PEM certificate chain; None: plain HTTP."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    api_key: str | None = None
    """Bearer token that every call but health must carry; None: no authentication."""
    api_keys: tuple[ApiKey, ...] = ()
    """More keys, with limits of their own."""
    insecure: bool = False
    """Allow any address without TLS or key: behind a proxy that has both."""
    model_name: str | None = None
    """Model name in requests; None: the name from the verifier."""
    chat_template: str | None = None
    """Jinja template; None: that of the tokenizer."""
    max_body_bytes: int = 4 << 20
    """Longest request body."""
    max_requests: int = 256
    """Requests in flight; more get status 429."""
    strict: bool = False
    """Refuse unknown fields of requests instead of warning."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may send requests from a browser; "*": all."""
    access_log: bool = False
    """Log a line for each request."""
    keep_alive_seconds: float = 10.0
    """Time without a token after which a stream gets a comment. Unit: seconds."""
    drain_seconds: float = 30.0
    """How long requests in flight may continue after SIGTERM. Unit: seconds."""
    metrics_address: str | None = None
    """`host:port` or `[v6]:port` for Prometheus; None: no metrics."""
    insecure_metrics: bool = False
    """Allow metrics on any address without TLS and key."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionsError("TLS needs both --http-tls-cert and --http-tls-key")
        try:
            self.keys  # noqa: B018 - checks the key
        except ValidationError:
            raise OptionsError(
                "the API key is empty or has characters that are invalid in HTTP headers"
            ) from None
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
        self.metrics  # noqa: B018 - checks the options of metrics
        secured = self.tls_cert is not None and bool(self.keys)
        if not (secured or self.insecure or stays_on_this_machine(self.address)):
            raise OptionsError(
                f"refusing to listen on {self.address} without TLS and a key: give "
                "--http-tls-cert, --http-tls-key and --api-key-file, listen on 127.0.0.1 or "
                "unix:/path, or give --insecure if a proxy in front of it has both"
            )

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys; empty: no authentication."""
        if self.api_key is None:
            return self.api_keys
        return (ApiKey(name="default", key=self.api_key), *self.api_keys)

    @property
    def metrics(self) -> ServerOptions:
        """Options of the metrics endpoint, with the API key as its token.

        Raises:
            OptionsError: Metrics would be served beyond this machine without TLS and a key.
        """
        return ServerOptions(
            address="127.0.0.1:0",  # unused
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            token=self.api_key,
            metrics_address=self.metrics_address,
            insecure_metrics=self.insecure_metrics,
        )
