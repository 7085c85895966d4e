"""The shape of a LongSpec layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import LayerShape


@dataclass(frozen=True)
class LongSpecConfig(LayerShape):
    """Shape of a LongSpec layer, and the target layer that it reads.

    Heads, their width and the rotary embedding are the target's, because cross-attention reads the
    target's keys unchanged. No projection has a bias and heads are not normalised, even if the
    target's are.
    """

    method: ClassVar[str] = "longspec"
    SIZES: ClassVar = (*LayerShape.SIZES, "window")

    target_layer: int  # target layer whose keys and values are read, 0 for the first
    target_layers: int  # number of layers of the target
    window: int = 512  # positions that self-attention sees, the token's own included, in tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.target_layer < self.target_layers:
            raise UnsupportedModelError(
                f"target_layer is {self.target_layer}, expected 0 to {self.target_layers - 1}: the "
                f"target has {self.target_layers} layers"
            )

    @property
    def of_target(self) -> dict[str, int]:
        read = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "layers": self.target_layers}
        return {**super().of_target, **read}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        wide, q = self.hidden, self.q_heads * self.head_dim
        return {
            **self.layer_tensors("layers.0."),
            "layers.0.cross_layernorm.weight": (wide,),
            "layers.0.cross_attn.q_proj.weight": (q, wide),
            "layers.0.cross_attn.o_proj.weight": (wide, q),
            "norm.weight": (wide,),
        }

    @classmethod
    def for_target(cls, path: str | Path, *, target_layer: int = -1, **fields: Any) -> Self:
        """See :meth:`LayerShape.for_target`; by default the last layer is read."""
        return super().for_target(path, target_layer=target_layer, **fields)
