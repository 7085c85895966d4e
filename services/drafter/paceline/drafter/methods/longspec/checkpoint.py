"""The folder of a LongSpec drafter, in the speculators format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
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
    layer, section = config.to_json()
    described = {
        **speculators_fields("LongSpecModel", METHOD, "tree", levels, target),
        "transformer_layer_config": layer,
    }
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
    return LongSpecConfig.from_json(layer, section), dtype
