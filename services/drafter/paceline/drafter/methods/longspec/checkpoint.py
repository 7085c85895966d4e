"""The folder of a LongSpec drafter, in the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.layers import config_errors
from paceline.drafter.methods.longspec.config import LongSpecConfig
from paceline.drafter.methods.target import (
    CONFIG_FILE,
    SECTION,
    TargetRef,
    read_config_file,
    speculators_fields,
    write_checkpoint,
)

METHOD = "longspec"

_SECTION_FIELDS = {
    "target_layer": int,
    "target_layers": int,
    "final_norm": bool,
    "draft_vocab_size": int,
}
"""Fields of the configuration in the ``paceline`` section."""


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
    """Writes a drafter's folder.

    Args:
        folder: Created if it does not exist.
        config: Shape of the layer.
        weights: State dict of a :class:`~paceline.drafter.methods.longspec.LongSpecModel`.
        target: The target that it was trained for.
        levels: Depth that it was trained to draft to. Unit: tokens.
        dtype: Type of the tensors in the file, usually the target's.
        notes: Written to the ``paceline`` section as ``training``: how it was trained.
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


def read_longspec(folder: str | Path) -> tuple[LongSpecConfig, torch.dtype]:
    """Reads the shape of a drafter's layer and the type of its tensors from its config.json.

    Raises:
        UnsupportedModelError: It is no LongSpec drafter, of another format, or a field is missing.
        FileNotFoundError: There is no config.json.
    """
    path = Path(folder) / CONFIG_FILE
    described = read_config_file(folder, METHOD)
    section, layer = described.get(SECTION), described.get("transformer_layer_config")
    if not isinstance(section, dict) or not isinstance(layer, dict):
        raise UnsupportedModelError(
            f"{path} has no '{SECTION}' section or no 'transformer_layer_config', expected a "
            "folder written by paceline's training"
        )
    dtype = getattr(torch, str(described.get("dtype")), None)
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedModelError(
            f"{path} has the dtype {described.get('dtype')!r}, expected float32 or bfloat16"
        )
    if layer.get("hidden_act") != "silu":
        raise UnsupportedModelError(
            f"activation {layer.get('hidden_act')!r} is not supported, only 'silu'"
        )
    with config_errors("longspec"):
        section = {"draft_vocab_size": 0, **section}  # older folders do not have it
        rest = {name: kind(section[name]) for name, kind in _SECTION_FIELDS.items()}
        return LongSpecConfig.from_hf(layer, **rest), dtype
