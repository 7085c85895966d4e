"""Options, checked when they are created."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import grpc

from paceline.sampling import Sampling, SamplingError

from ._errors import InvalidRequestError

if TYPE_CHECKING:
    from ._generation import Generation

P = ParamSpec("P")
T = TypeVar("T")


def _require(fine: bool, what: str, expected: str, value: object) -> None:
    if not fine:
        raise InvalidRequestError(f"{what} must be {expected}, not {value!r}")


@dataclass(frozen=True)
class TlsOptions:
    """TLS for the connections to the services."""

    ca: Path | None = None
    """PEM file of the authority that signed the services' certificates; None: the system's."""
    cert: Path | None = None
    """PEM file of the client's own certificate, for mutual TLS."""
    key: Path | None = None
    """PEM file of the key of `cert`."""
    server_name: str | None = None
    """Expected name in the certificate, if it is not the host of the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Channel credentials. Raises InvalidRequestError if a file cannot be read."""
        try:
            return grpc.ssl_channel_credentials(
                root_certificates=self.ca.read_bytes() if self.ca else None,
                private_key=self.key.read_bytes() if self.key else None,
                certificate_chain=self.cert.read_bytes() if self.cert else None,
            )
        except OSError as error:
            raise InvalidRequestError(f"cannot read a TLS file: {error}") from error

    def channel_options(self, name: str = "") -> list[tuple[str, Any]]:
        """Options of a channel with these credentials.

        Args:
            name: Expected name in the certificate, unless `server_name` is set; empty: the host.
        """
        expected = self.server_name or name
        return [("grpc.ssl_target_name_override", expected)] if expected else []

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError("mutual TLS needs both cert and key: give both, or neither")


@dataclass(frozen=True)
class RetryOptions:
    """How long and how often to try again when the verifier cannot be reached or is full."""

    budget: float = 30.0
    """Longest time without progress before the error is raised. Unit: seconds."""
    first_delay: float = 0.05
    """Delay before the second attempt; doubles with each attempt. Unit: seconds."""
    longest_delay: float = 2.0
    """Longest delay between two attempts. Unit: seconds."""

    def __post_init__(self) -> None:
        _require(self.budget >= 0, "retry budget", ">= 0 seconds", self.budget)
        _require(0 < self.first_delay <= self.longest_delay, "first_delay", "> 0", self.first_delay)


@dataclass(frozen=True)
class DraftOptions:
    """When the verifier drafts, and how long it waits for a tree."""

    timeout: float | None = None
    """Longest wait for a tree. None: a multiple of the drafter's mean time, chosen by the verifier.
    Unit: seconds."""
    adaptive: bool = True
    """Draft only where that increases the speed. False: draft in every step, to measure drafting.
    """

    def __post_init__(self) -> None:
        if self.timeout is not None:
            expected = "> 0 and < 2**22 seconds"  # Milliseconds in 32 bits.
            _require(0 < self.timeout < 2**22, "draft timeout", expected, self.timeout)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Sampling):
    """The keyword arguments of `Client.generate`: sampling parameters, and these.

    Raises:
        InvalidRequestError: One is out of its range. `metadata["param"]` is a sampling parameter.
    """

    max_new_tokens: int = 256
    """Maximum number of tokens to emit."""
    stop: str | Sequence[str] = ()
    """Strings that end the text; it ends before the first that is complete."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the generation, besides end-of-sequence."""
    ignore_eos: bool = False
    """Continue after end-of-sequence tokens."""
    logprobs: bool | int = False
    """True returns each token's log-probability; n > 0 also the n likeliest tokens."""
    prompt_logprobs: int | None = None
    """n >= 0 returns the log-probability of each prompt token but the first, and of the n likeliest
    tokens at its position."""
    drafter: str | None = None
    """Name of the drafter, or `NAME@VERSION` for a version, active or not; "none" turns drafting
    off. None: the verifier's default drafter."""
    deadline: float | None = None
    """Longest time for the whole generation. Unit: seconds."""
    max_nodes: int | None = None
    """Maximum number of drafted tokens per step. None: the limit of the services."""
    parent: Generation | bytes | None = None
    """A generation (or its handle) with a cache: the common prefix of its text and this prompt is
    not computed again."""
    keep_cache: bool = False
    """Keep the cache after the end, as a `parent`, until `aclose`."""
    on_prefill: Callable[[int, int], None] | None = None
    """Called with (tokens prefilled, all tokens) during the prefill."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except SamplingError as error:
            param = {"param": error.parameter}
            raise InvalidRequestError(str(error), metadata=param) from None
        ids = range(2**32)
        _require(0 < self.max_new_tokens < 2**32, "max_new_tokens", ">= 1", self.max_new_tokens)
        for text in self.stop_strings:
            _require(text != "", "a stop string", "non-empty", text)
        for token in self.stop_token_ids:
            _require(token in ids, "a stop token id", "a token id", token)
        _require(0 <= self.logprobs <= 20, "logprobs", "at most 20", self.logprobs)
        scored = self.prompt_logprobs
        _require(scored is None or 0 <= scored <= 20, "prompt_logprobs", "in [0, 20]", scored)
        if self.deadline is not None:
            _require(self.deadline > 0, "deadline", "> 0 seconds", self.deadline)
        if self.max_nodes is not None:
            _require(self.max_nodes > 0, "max_nodes", ">= 1", self.max_nodes)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """All stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def parent_handle(self) -> bytes:
        """Handle of the parent's cache; empty: none."""
        if self.parent is None or isinstance(self.parent, bytes):
            return self.parent or b""
        return self.parent.handle


def takes(
    options: Callable[P, GenerationOptions],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, str | Sequence[int], P], T]]:
    """Decorates a method `(self, prompt, **options)` with the signature of its options.

    Type checkers, editors and `help` show all of them, without a second list.
    """

    def decorated(
        method: Callable[..., T],
    ) -> Callable[Concatenate[Any, str | Sequence[int], P], T]:
        own = list(signature(method).parameters.values())[:2]
        every = [*own, *signature(options).parameters.values()]
        method.__signature__ = Signature(every)  # type: ignore[attr-defined]
        return method

    return decorated


def user_cache_dir() -> Path:
    """The user's cache folder of this project."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "paceline"
