"""Sampling parameters of a generation: the one list of them, their ranges, and their message.

Client, gateway, verifier and drafter use it. It imports no numpy and no torch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.checks import Checked, ParameterError, as_json, checked, items, require
from paceline.v1 import sampling_pb2

__all__ = ["CONSTRAINTS", "MAX_LOGIT_BIAS", "MAX_TOKEN_IDS", "Sampling", "token_ids"]
CONSTRAINTS = ("json_schema", "regex", "grammar")
"""Parameters that constrain the text; at most one is set."""
MAX_LOGIT_BIAS = 4096
"""Maximum number of tokens in `logit_bias`."""
MAX_TOKEN_IDS = 1 << 24
"""Maximum number of token ids in one argument."""

MIN_TEMPERATURE = 2.0**-60
"""A lower temperature is 0: it would choose the same tokens. The kernels have the same bound."""
_LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest float32, the type of the message's numbers."""
_SMALLEST = 2.0**-126

_MODES = {
    "invariant": sampling_pb2.ACCEPTANCE_MODE_INVARIANT,
    "rejection": sampling_pb2.ACCEPTANCE_MODE_REJECTION,
}
_ACCEPTANCE = {mode: name for name, mode in _MODES.items()} | {
    sampling_pb2.ACCEPTANCE_MODE_UNSPECIFIED: "invariant"
}
_SAME = (
    *("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed"),
    *("regex", "grammar"),
)
"""Parameters that are the same in the message."""


def token_ids(
    parameter: str, value: object, expected: str, max_items: int = MAX_TOKEN_IDS
) -> list[int]:
    """Return token ids of a sequence, array or tensor. Raises ParameterError as `items`."""
    ids = items(parameter, value, expected, max_items)
    if _are_ids(ids):
        return ids  # a prompt has thousands
    return [_token_id(parameter, token, f"[{index}]") for index, token in enumerate(ids)]


def _are_ids(values: Collection[Any]) -> bool:
    """Return whether all values are token ids, and none must be converted to one."""
    if not set(map(type, values)) <= {int}:
        return False
    lowest: int = min(values, default=0)
    return 0 <= lowest <= max(values, default=0) < 2**32


def _token_id(parameter: str, value: object, at: str) -> int:
    expected = "a token id, an integer in [0, 2**32)"
    return checked(parameter, value, int, expected, lambda token: 0 <= token < 2**32, at)


def _holds(number: float) -> bool:
    """Return whether a number is finite as a float32."""
    return abs(number) <= _LARGEST


def _is_bias(number: float) -> bool:
    """Return whether a number is finite as a float32, or minus infinity."""
    return number == -math.inf or _holds(number)


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """Sampling parameters, checked when created. Numbers are float32 in the message. Raises
    ``ParameterError``: a parameter is of another type or out of its range, or several constraints
    are set."""

    temperature: float = 0.0
    """Divide the logits by this; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens of this probability, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the highest probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Scale down the logits of tokens that prompt or output have; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract this from the logit of every token that the output has; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtract this from a token's logit for each time that the output has it; 0 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Add these to the logits of single tokens, by token id; -inf excludes a token."""
    seed: int | None = None
    """Seed of the sampling noise, an integer of 64 bits. None: a random one."""
    acceptance: str = "invariant"
    """How drafts are accepted. "invariant": the tokens do not depend on the drafter; "rejection":
    rejection sampling of chains, where only their distribution does not."""
    json_schema: Mapping[str, Any] | str | None = None
    """JSON schema of the text. The text may end early by max_new_tokens."""
    regex: str | None = None
    """Regular expression that the whole text matches, in the syntax of Rust's crate."""
    grammar: str | None = None
    """Context-free grammar of the text, in Lark's or in GBNF's notation."""

    def __post_init__(self) -> None:
        if self.seed is None:
            self._keep("seed", secrets.randbits(64))
        take = self._take
        take("temperature", float, "a finite number >= 0", lambda x: x >= 0 and _holds(x))
        if self.temperature < MIN_TEMPERATURE:
            self._keep("temperature", 0.0)
        take("top_k", int, "an integer >= 0 (0 keeps all tokens)", lambda x: 0 <= x < 2**32)
        take("top_p", float, "a number in (0, 1]", lambda x: 0 < x <= 1)
        take("min_p", float, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        take("repetition_penalty", float, "a finite number > 0", lambda x: x > 0 and _holds(x))
        take("presence_penalty", float, "a finite number", _holds)
        take("frequency_penalty", float, "a finite number", _holds)
        take("seed", int, "an integer in [0, 2**64)", lambda x: 0 <= x < 2**64)
        take("acceptance", str, " or ".join(_MODES), lambda x: x in _MODES)
        take("regex", str, "a text", optional=True)
        take("grammar", str, "a text", optional=True)
        self._keep("logit_bias", self._checked_bias())
        self._schema_text()
        given = [name for name in CONSTRAINTS if getattr(self, name)]
        if len(given) > 1:
            raise ParameterError(given[0], f"give one of {', '.join(given)}: a text has one")

    def _checked_bias(self) -> dict[int, float] | None:
        biases = self.logit_bias
        if biases is None:
            return None
        require("logit_bias", biases, Mapping, "a mapping of token ids to numbers")
        if len(biases) > MAX_LOGIT_BIAS:
            expected = f"a mapping of at most {MAX_LOGIT_BIAS} token ids"
            raise ParameterError.unexpected("logit_bias", expected, biases)
        expected = "a finite number, or -inf (never)"
        values = biases.values()
        if _are_ids(biases) and set(map(type, values)) <= {float} and all(map(_is_bias, values)):
            return dict(biases)  # thousands, one by one, would hold up other texts
        return {
            _token_id("logit_bias", token, " (its keys)"): checked(
                "logit_bias", bias, float, expected, _is_bias, f"[{token}]"
            )
            for token, bias in biases.items()
        }

    @property
    def key(self) -> int:
        """The seed, which is set once the parameters are checked."""
        assert self.seed is not None
        return self.seed

    @property
    def rejects(self) -> bool:
        """Whether rejection sampling decides acceptance; at temperature 0 both modes are equal."""
        return self.temperature > 0 and self.acceptance == "rejection"

    def _schema_text(self) -> str:
        schema = self.json_schema
        if schema is None or isinstance(schema, str):
            return checked("json_schema", schema or "", str, "a text")
        if not isinstance(schema, Mapping):
            raise ParameterError.unexpected(
                "json_schema", "a JSON schema: a mapping or text", schema
            )
        return as_json("json_schema", schema)

    def to_proto(self) -> sampling_pb2.SamplingParams:
        """Return the protocol message."""
        return sampling_pb2.SamplingParams(
            **{name: getattr(self, name) for name in _SAME},
            top_p=max(self.top_p, _SMALLEST),  # 0 would mean unset
            repetition_penalty=max(self.repetition_penalty, _SMALLEST),
            logit_bias=dict(self.logit_bias or {}),
            mode=_MODES[self.acceptance],
            json_schema=self._schema_text(),
        )

    @staticmethod
    def from_proto(message: sampling_pb2.SamplingParams) -> Sampling:
        """Return the parameters of a message; 0 becomes 1 where the protocol defines 0 as unset.
        Raises ``ParameterError``: a parameter is out of its range."""
        if message.mode not in _ACCEPTANCE:
            raise ParameterError(
                "acceptance", f"mode {message.mode} is unknown, expected INVARIANT or REJECTION"
            )
        return Sampling(
            **{name: getattr(message, name) for name in _SAME},
            top_p=message.top_p or 1.0,
            repetition_penalty=message.repetition_penalty or 1.0,
            logit_bias=dict(message.logit_bias),
            acceptance=_ACCEPTANCE[message.mode],
            json_schema=message.json_schema,
        )
