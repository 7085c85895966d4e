"""One recorded text, as a line of JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from paceline.v1 import sampling_pb2

LONGEST = 1 << 16
"""Most tokens of a text, its prompt included."""


@dataclass(frozen=True)
class Recording:
    """A text as token ids of the target's tokenizer: at least one of the prompt and one after it.

    Raises:
        ValueError: It is none.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """How it went on."""

    temperature: float = 0.0
    """At which it was sampled."""

    seed: int = 0

    target: str = ""
    """Fingerprint of the target that wrote it; empty: not known."""

    def __post_init__(self) -> None:
        ids = self.prompt + self.tokens
        fine = 0 <= self.temperature < math.inf and 0 <= self.seed < 1 << 64
        fine &= all(isinstance(token, int) and 0 <= token < 1 << 32 for token in ids)
        if not (fine and self.prompt and self.tokens and len(ids) <= LONGEST):
            raise ValueError("prompt and tokens must be token ids, at least one each")

    @property
    def sampling(self) -> sampling_pb2.SamplingParams:
        """How the tokens were chosen."""
        return sampling_pb2.SamplingParams(temperature=self.temperature, seed=self.seed)

    @classmethod
    def from_json(cls, line: str) -> Recording:
        """Read a line ``{"prompt": [...], "tokens": [...]}``.

        Sampled texts also say ``"temperature"`` and ``"seed"``, recorded ones their ``"target"``.

        Raises:
            ValueError: It has another form.
            LookupError: A field is missing.
            TypeError: A field is of another kind.
        """
        value: dict[str, Any] = json.loads(line)
        return cls(
            tuple(value["prompt"]),
            tuple(value["tokens"]),
            float(value.get("temperature", 0.0)),
            int(value.get("seed", 0)),
            str(value.get("target", "")),
        )

    def to_json(self) -> str:
        """The line, without its end."""
        fields = {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "target": self.target,
        }
        return json.dumps(fields, separators=(",", ":"))
