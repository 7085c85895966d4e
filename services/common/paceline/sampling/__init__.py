"""Sampling parameters of a generation: the one list of them, their ranges, and their message.

Client, gateway, verifier and drafter use it. It imports no numpy and no torch.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.v1 import sampling_pb2

CONSTRAINTS = ("json_schema", "regex", "grammar")
"""Parameters that constrain the text; at most one is set."""
MAX_LOGIT_BIAS = 4096
"""Maximum number of tokens in `logit_bias`."""

_MODES = {
    "invariant": sampling_pb2.ACCEPTANCE_MODE_INVARIANT,
    "rejection": sampling_pb2.ACCEPTANCE_MODE_REJECTION,
}
_ACCEPTANCE = {mode: name for name, mode in _MODES.items()} | {
    sampling_pb2.ACCEPTANCE_MODE_UNSPECIFIED: "invariant"
}
_IDS = range(2**32)


class SamplingError(ValueError):
    """A parameter is out of its range.

    Attributes:
        parameter: Its name.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters, checked when created.

    Raises:
        SamplingError: A parameter is out of its range, or several constraints are set.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens of this probability, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the highest probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Scales down logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once for a token seen in the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was seen in the output; 0 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single tokens, by token id; -inf excludes a token."""
    seed: int | None = None
    """Key of the sampling noise, 64 bits. None: a random one."""
    acceptance: str = "invariant"
    """"invariant", or "rejection": rejection sampling of chains, whose tokens depend on the
    drafter, but not their distribution."""
    json_schema: Mapping[str, Any] | str | None = None
    """JSON schema of the text. The text may end early by max_new_tokens."""
    regex: str | None = None
    """Regular expression that the whole text matches, in the syntax of Rust's crate."""
    grammar: str | None = None
    """Context-free grammar of the text, in Lark's or in GBNF's notation."""

    def __post_init__(self) -> None:
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(64))
        require = self._require
        require("temperature", 0 <= self.temperature < math.inf, "finite and >= 0")
        require("top_k", self.top_k in _IDS, ">= 0 (0 keeps all tokens)")
        require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        require("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and > 0")
        require("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        require("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        require("seed", 0 <= self.key < 2**64, "in [0, 2**64)")
        require("acceptance", self.acceptance in _MODES, " or ".join(_MODES))
        self._check_bias(self.logit_bias or {})
        given = [name for name in CONSTRAINTS if getattr(self, name)]
        if len(given) > 1:
            raise SamplingError(given[0], f"give one of {', '.join(given)}: a text has one")
        self._schema_text()

    def _require(self, parameter: str, valid: bool, expected: str) -> None:
        if not valid:
            value = getattr(self, parameter)
            raise SamplingError(parameter, f"{parameter} must be {expected}, not {value!r}")

    def _check_bias(self, biases: Mapping[int, float]) -> None:
        if len(biases) > MAX_LOGIT_BIAS:
            raise SamplingError(
                "logit_bias",
                f"logit_bias names {len(biases)} tokens, expected at most {MAX_LOGIT_BIAS}",
            )
        for token, bias in biases.items():
            if token not in _IDS or not bias < math.inf:
                raise SamplingError(
                    "logit_bias",
                    f"logit_bias of {token!r} is {bias!r}, expected a number or -inf (never) for a "
                    "token id",
                )

    @property
    def key(self) -> int:
        """The seed, which is set once the parameters are checked."""
        assert self.seed is not None
        return self.seed

    def _schema_text(self) -> str:
        if self.json_schema is None or isinstance(self.json_schema, str):
            return self.json_schema or ""
        try:
            return json.dumps(self.json_schema)
        except (TypeError, ValueError) as error:
            raise SamplingError(
                "json_schema", f"json_schema cannot be written as JSON: {error}"
            ) from None

    def to_proto(self) -> sampling_pb2.SamplingParams:
        """The protocol message."""
        return sampling_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias or {}),
            seed=self.key,
            mode=_MODES[self.acceptance],
            json_schema=self._schema_text(),
            regex=self.regex,
            grammar=self.grammar,
        )

    @staticmethod
    def from_proto(message: sampling_pb2.SamplingParams) -> Sampling:
        """The parameters of a message; 0 becomes 1 where the protocol defines 0 as unset.

        Raises:
            SamplingError: A parameter is out of its range.
        """
        if message.mode not in _ACCEPTANCE:
            raise SamplingError(
                "acceptance", f"mode {message.mode} is unknown, expected INVARIANT or REJECTION"
            )
        return Sampling(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p or 1.0,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            seed=message.seed,
            acceptance=_ACCEPTANCE[message.mode],
            json_schema=message.json_schema,
            regex=message.regex,
            grammar=message.grammar,
        )
