"""Shape and constants of a LongSpec layer, and their form in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import LayerShape, target_shape

_LAYER_FIELDS = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "q_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position",
    "sliding_window": "window",
}


@dataclass(frozen=True)
class LongSpecConfig(LayerShape):
    """Shape of a LongSpec layer, and the target layer that it reads.

    Heads, their width and the rotary embedding are the target's, because cross-attention reads the
    target's keys unchanged. No projection has a bias and heads are not normalised, even if the
    target's are.

    Attributes:
        target_layer: Target layer whose keys and values are read, 0 for the first.
        target_layers: Number of layers of the target.
        window: Positions that self-attention sees, the token's own included. Unit: tokens.
        final_norm: Whether there is a norm before the LM head; the paper's layer has none.
    """

    COUNTS: ClassVar[tuple[str, ...]] = (*LayerShape.COUNTS, "window", "target_layers")

    target_layer: int
    target_layers: int
    window: int = 512
    final_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.target_layer < self.target_layers:
            raise UnsupportedModelError(
                f"target_layer is {self.target_layer}, expected 0 to {self.target_layers - 1}: the "
                f"target has {self.target_layers} layers"
            )

    @classmethod
    def for_target(
        cls,
        folder: str | Path,
        *,
        layer: int = -1,
        window: int = 512,
        intermediate: int | None = None,
        final_norm: bool = True,
    ) -> LongSpecConfig:
        """Returns the shape of a layer for a target.

        Args:
            folder: The target's Hugging Face folder.
            layer: Target layer to read; negative ones count from the last.
            window: See the class. Unit: tokens.
            intermediate: Width of the feed-forward block; None: the target's.
            final_norm: See the class.

        Raises:
            UnsupportedModelError: The decoder does not support the target, or it lacks the layer.
            FileNotFoundError: The folder has no config.json.
        """
        shape, target = target_shape(folder, intermediate)
        return cls(
            **shape,
            target_layer=layer + target.layers if layer < 0 else layer,
            target_layers=target.layers,
            window=window,
            final_norm=final_norm,
        )

    def to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns ``transformer_layer_config`` of speculators, and fields of the own section."""
        layer: dict[str, Any] = {key: getattr(self, name) for key, name in _LAYER_FIELDS.items()}
        layer |= {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": dict(self.rope_parameters),
        }
        rest = {
            "target_layer": self.target_layer,
            "target_layers": self.target_layers,
            "final_norm": self.final_norm,
        }
        return layer, rest

    @classmethod
    def from_json(cls, layer: Mapping[str, Any], rest: Mapping[str, Any]) -> LongSpecConfig:
        """Inverse of :meth:`to_json`. No field has a default.

        Raises:
            UnsupportedModelError: A field is missing or invalid.
        """
        if layer.get("hidden_act") != "silu":
            raise UnsupportedModelError(
                f"activation {layer.get('hidden_act')!r} is not supported, only 'silu'"
            )
        try:
            return cls(
                **{name: layer[key] for key, name in _LAYER_FIELDS.items()},
                norm_eps=float(layer["rms_norm_eps"]),
                rope_parameters=dict(layer["rope_parameters"]),
                target_layer=int(rest["target_layer"]),
                target_layers=int(rest["target_layers"]),
                final_norm=bool(rest["final_norm"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UnsupportedModelError):
                raise
            raise UnsupportedModelError(
                f"a field of the layer is missing or invalid in config.json: {error!r}"
            ) from error
