"""Configuration of a LongSpec layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import LayerShape, target_fields


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

    HF_FIELDS: ClassVar = {**LayerShape.HF_FIELDS, "window": "sliding_window"}

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
    def for_target(cls, folder: str | Path, *, layer: int = -1, **fields: Any) -> LongSpecConfig:
        """Returns the configuration of a layer for a target.

        Args:
            folder: The target's Hugging Face folder.
            layer: Target layer to read; negative ones count from the last.
            fields: Other fields, such as ``window``; None: the target's.

        Raises:
            UnsupportedModelError: The decoder does not support the target, or it lacks the layer.
            FileNotFoundError: The folder has no config.json.
        """
        found = target_fields(folder, fields)
        count = found["target_layers"]
        return cls(**found, target_layer=layer + count if layer < 0 else layer)
