"""Configuration of a LongSpec layer, and its folder in the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import (
    TargetRef,
    read_shape,
    speculators_fields,
    write_checkpoint,
)
from paceline.drafter.methods.layers import LayerShape, config_errors

METHOD = "longspec"

# Fields of the configuration in the `paceline` section.
_SECTION_FIELDS = ("target_layer", "target_layers", "draft_vocab_size")


@dataclass(frozen=True)
class LongSpecConfig(LayerShape):
    """Shape of a LongSpec layer, and the target layer that it reads.

    Heads, their width and the rotary embedding are the target's, because cross-attention reads the
    target's keys unchanged. No projection has a bias and heads are not normalised, even if the
    target's are.
    """

    HF_FIELDS: ClassVar = {**LayerShape.HF_FIELDS, "window": "sliding_window"}

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


def save_longspec(
    folder: str | Path,
    config: LongSpecConfig,
    weights: Mapping[str, Tensor],
    target: TargetRef,
    *,
    levels: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter's folder.

    ``weights`` are its tensors by name, ``levels`` is the depth that it was trained to draft to,
    ``dtype`` the type in the file, usually the target's.
    ``notes`` say how it was trained.
    """
    layer = {**config.to_hf(), "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    described = {
        **speculators_fields("LongSpecModel", METHOD, "tree", levels, target),
        "transformer_layer_config": layer,
    }
    section = {name: getattr(config, name) for name in _SECTION_FIELDS}
    write_checkpoint(
        folder, METHOD, described, weights, target, dtype=dtype, section=section, notes=notes
    )


@config_errors(METHOD)
def longspec_config(described: Mapping[str, Any]) -> LongSpecConfig:
    """Read the shape of a drafter from all of a config.json.

    Raises:
        UnsupportedModelError: It is no LongSpec drafter, or a field is missing.
    """
    section, layer = described.get(SECTION), described.get("transformer_layer_config")
    if not isinstance(section, dict) or not isinstance(layer, dict):
        raise UnsupportedModelError(
            f"there is no '{SECTION}' section or no 'transformer_layer_config', expected a "
            "folder written by paceline's training"
        )
    if layer.get("hidden_act") != "silu":
        raise UnsupportedModelError(
            f"activation {layer.get('hidden_act')!r} is not supported, only 'silu'"
        )
    section = {"draft_vocab_size": 0, **section}  # older folders do not have it
    rest = {name: int(section[name]) for name in _SECTION_FIELDS}
    return LongSpecConfig.from_hf(layer, **rest)


def read_longspec(folder: str | Path, target_layers: int = 0) -> tuple[LongSpecConfig, torch.dtype]:
    """See :func:`read_shape`; config.json has the depth of the target."""
    return read_shape(folder, METHOD, longspec_config, "layers.0.self_attn.q_proj.weight")
