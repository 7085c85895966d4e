"""Options, checked when they are created."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from paceline.v1 import sampling_pb2

from ._errors import InvalidRequestError

_MODES = {
    "invariant": sampling_pb2.ACCEPTANCE_MODE_INVARIANT,
    "rejection": sampling_pb2.ACCEPTANCE_MODE_REJECTION,
}


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


@dataclass(frozen=True)
class GenerationOptions:
    """The arguments of `Client.generate` besides the prompt; see there."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    acceptance: str = "invariant"
    json_schema: str = ""
    regex: str = ""
    grammar: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    drafter: str | None = None
    deadline: float | None = None
    max_nodes: int | None = None
    parent_handle: bytes = b""
    on_prefill: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        ids = range(2**32)
        finite = math.isfinite
        _require(0 < self.max_new_tokens < 2**32, "max_new_tokens", ">= 1", self.max_new_tokens)
        temperature, penalty = self.temperature, self.repetition_penalty
        _require(0 <= temperature < math.inf, "temperature", "finite and >= 0", temperature)
        _require(self.top_k in ids, "top_k", ">= 0 (0 keeps all tokens)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(0 < penalty < math.inf, "repetition_penalty", "finite and > 0", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(finite(getattr(self, name)), name, "finite", getattr(self, name))
        for token, bias in self.logit_bias.items():
            _require(token in ids, "a logit_bias key", "a token id", token)
            _require(bias < math.inf, "a logit_bias value", "a number or -inf (never)", bias)
        _require(0 <= self.seed < 2**64, "seed", "in [0, 2**64)", self.seed)
        _require(self.acceptance in _MODES, "acceptance", " or ".join(_MODES), self.acceptance)
        for text in self.stop:
            _require(text != "", "a stop string", "non-empty", text)
        for token in self.stop_token_ids:
            _require(token in ids, "a stop token id", "a token id", token)
        _require(0 <= self.top_logprobs <= 20, "logprobs", "at most 20", self.top_logprobs)
        scored = self.prompt_logprobs
        _require(scored is None or 0 <= scored <= 20, "prompt_logprobs", "in [0, 20]", scored)
        constraints = [self.json_schema, self.regex, self.grammar]
        if sum(map(bool, constraints)) > 1:
            raise InvalidRequestError("give one of json_schema, regex and grammar")
        if self.deadline is not None:
            _require(self.deadline > 0, "deadline", "> 0 seconds", self.deadline)
        if self.max_nodes is not None:
            _require(self.max_nodes > 0, "max_nodes", ">= 1", self.max_nodes)

    def sampling(self) -> sampling_pb2.SamplingParams:
        """The sampling parameters as a protocol message."""
        names = (
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "seed", "json_schema", "regex", "grammar"),
        )
        return sampling_pb2.SamplingParams(
            **{name: getattr(self, name) for name in names},
            logit_bias=dict(self.logit_bias),
            mode=_MODES[self.acceptance],
        )


def schema_text(schema: Mapping[str, Any] | str | None) -> str:
    """A JSON schema as text; empty for None. Raises InvalidRequestError if it is not JSON."""
    if schema is None or isinstance(schema, str):
        return schema or ""
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"json_schema cannot be written as JSON: {error}") from None


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """`stop` as a tuple; a string is one stop string."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def user_cache_dir() -> Path:
    """The user's cache folder of this project."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "paceline"
