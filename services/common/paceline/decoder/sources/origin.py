"""What a model keeps in every format: its tokens, and about the values of its weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from paceline.decoder.sources.base import ModelSource

_VALUES = 64
_LEAST_COSINE = 0.9  # 4 bits leave 0.99, unrelated weights are near 0


@dataclass(frozen=True)
class Origin:
    """Tells whether two models are formats of one: folder, GGUF file, any number of bits.

    It does not tell a model from one that was trained a little further. Use it where a mistake
    costs time and nothing else.

    Attributes:
        tokens: SHA-256 (hex) of the tokens by id; of nothing if the model has no tokenizer.
        weights: Values spread over a matrix of the last layer.
    """

    tokens: str
    weights: tuple[float, ...]

    @classmethod
    def of(cls, source: ModelSource) -> Self:
        """Read a model's tokenizer and one of its matrices."""
        known = json.loads(source.tokenizer or b"{}")
        tokens = dict(known.get("model", {}).get("vocab", {}))
        tokens |= {each["content"]: each["id"] for each in known.get("added_tokens", ())}
        name = f"model.layers.{source.config().layers - 1}.mlp.down_proj.weight"
        matrix = source.tensor(name, torch.float32, "cpu").flatten()
        places = torch.linspace(0, len(matrix) - 1, _VALUES, dtype=torch.float64).long()
        return cls(
            hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest(),
            tuple(round(value, 5) for value in matrix[places].tolist()),
        )

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``; an invalid description fits no model."""
        weights = described.get("weights")
        valid = isinstance(weights, list) and all(isinstance(w, float) for w in weights)
        return cls(str(described.get("tokens", "")), tuple(weights) if valid else ())

    def fits(self, other: Origin) -> bool:
        """Whether both are formats of one model."""
        if self.tokens != other.tokens or len(self.weights) != len(other.weights):
            return False
        pairs = list(zip(self.weights, other.weights, strict=True))
        norms = math.hypot(*self.weights) * math.hypot(*other.weights)
        return sum(a * b for a, b in pairs) > _LEAST_COSINE * norms
