"""Options of the gateway, and its API keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.service.options import (
    OptionsError,
    ServerOptions,
    byte_count,
    option,
    stays_on_this_machine,
)


class ApiKey(BaseModel):
    """A key and its limits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    """Name in the access log."""
    key: str = Field(min_length=1, repr=False)
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Generating requests; None: no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Tokens of prompts and texts; None: no limit."""

    @field_validator("key")
    @classmethod
    def _fits_a_header(cls, key: str) -> str:
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key has characters that are invalid in HTTP headers")
        return key


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Keys of a JSON file: an array of objects with the fields of `ApiKey`.

    Raises:
        OptionsError: The file is not that, or a key occurs twice.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(entries, list):
            raise OptionsError(f"{path} must contain an array of keys, such as [{{...}}]")
        keys = tuple(ApiKey.model_validate(entry) for entry in entries)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise OptionsError(f"{path}: {where}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise OptionsError(f"cannot read API keys from {path}: {error}") from None
    if not keys or len({each.key for each in keys}) < len(keys):
        raise OptionsError(f"{path} must contain at least one key, and none of them twice")
    return keys


@dataclass(frozen=True)
class GatewayOptions:
    """Options of one gateway, checked when created.

    Raises:
        OptionsError: They contradict each other, or would serve beyond this machine without TLS
            and a key.
    """

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
    api_keys: tuple[ApiKey, ...] = ()
    """More keys, with limits of their own."""
    insecure: bool = option(
        False, "listen beyond this machine without TLS or key: behind a proxy that has both"
    )
    model_name: str | None = option(
        None, "model name in requests (default: the name from the verifier)", metavar="NAME"
    )
    chat_template: str | None = None
    """Jinja template; None: that of the tokenizer."""
    max_body_bytes: int = option(
        4 << 20,
        "longest request body, such as 512KiB (default: 4MiB)",
        flag="max_body",
        type=byte_count,
        metavar="SIZE",
    )
    max_requests: int = option(256, "requests in flight; more get HTTP 429", metavar="N")
    strict: bool = option(
        False, "refuse unknown fields of requests instead of a warning in a header"
    )
    cors_origins: Sequence[str] = option(
        (),
        "origin of pages that may send requests from a browser, or * (can be repeated)",
        flag="cors_origin",
        type=str,
        action="append",
        metavar="ORIGIN",
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
