"""Where and how the gateway listens, and what it lets in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.service.options import OptionsError, ServerOptions, stays_on_this_machine


@dataclass(frozen=True)
class GatewayOptions:
    """Checked options of one gateway.

    Raises:
        OptionsError: if they contradict each other, or would serve beyond this machine without
            TLS and a key.
    """

    address: str = "127.0.0.1:8080"
    """`host:port` (port 0: any free one), `[v6]:port` or `unix:/path`."""
    tls_cert: Path | None = None
    """PEM certificate chain; None: plain HTTP."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    api_key: str | None = None
    """Bearer token that every call but health must carry; None: none is asked for."""
    insecure: bool = False
    """Listen without TLS or key on any address: behind a proxy that has both."""
    model_name: str | None = None
    """What requests call the model; None: the verifier's own name for it."""
    chat_template: str | None = None
    """Jinja template instead of the tokenizer's own; None: that one."""
    max_body_bytes: int = 4 << 20
    """Longest request taken."""
    max_requests: int = 256
    """Requests in flight; more are told to come again."""
    drain_seconds: float = 30.0
    """How long requests in flight may go on after SIGTERM."""
    metrics_address: str | None = None
    """`host:port` or `[v6]:port` for Prometheus to scrape; None: no metrics are kept."""
    insecure_metrics: bool = False
    """Serve metrics without the TLS and the key of the gateway, on any address."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionsError("TLS needs both --http-tls-cert and --http-tls-key")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionsError("the API key holds characters that HTTP headers cannot carry")
        if self.max_body_bytes < 1024:
            raise OptionsError("requests of at least 1 KiB must be taken: raise the limit")
        if self.max_requests < 1:
            raise OptionsError("at least one request must be let in at a time")
        if not 0 <= self.drain_seconds < float("inf"):
            raise OptionsError("the drain time must be a finite number of seconds, 0 or more")
        self.metrics  # noqa: B018 - checks them
        secured = self.tls_cert is not None and self.api_key is not None
        if not (secured or self.insecure or stays_on_this_machine(self.address)):
            raise OptionsError(
                f"refusing to listen on {self.address} without TLS and a key: give "
                "--http-tls-cert, --http-tls-key and --api-key-file, listen on 127.0.0.1 or "
                "unix:/path, or say --insecure if a proxy before it has both"
            )

    @property
    def metrics(self) -> ServerOptions:
        """Who may read the metrics: as for those of the services, with the key for a token.

        Raises:
            OptionsError: they would be served beyond this machine without TLS and a key.
        """
        return ServerOptions(
            address="127.0.0.1:0",  # no service of its own
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            token=self.api_key,
            metrics_address=self.metrics_address,
            insecure_metrics=self.insecure_metrics,
        )
