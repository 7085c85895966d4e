"""The folder of a DSpark drafter, in the layout of DeepSpec or of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
from paceline.decoder.weights import Checkpoint, take
from paceline.drafter.methods.checkpoint import (
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    TargetRef,
    read_config_file,
    write_checkpoint,
)
from paceline.drafter.methods.dspark.config import (
    DSparkConfig,
    Layout,
    layout_of,
    read_config,
    write_config,
)
from paceline.drafter.methods.dspark.module import DSparkModel
from paceline.drafter.methods.layers import DRAFT_TOKENS, drafted_tokens

METHOD = "dspark"

_DTYPES = {
    torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.bfloat16
}  # fmt: skip
"""Type of a drafter by that of its tensors."""
_OTHER_TENSORS = frozenset({EMBEDDING, HEAD, "t2d", DRAFT_TOKENS})
"""Tensors that a folder may also hold: the target's own, and maps between vocabularies."""


def save_dspark(
    folder: str | Path,
    config: DSparkConfig,
    weights: Mapping[str, Tensor],
    target: TargetRef,
    *,
    layout: Layout = Layout.SPECULATORS,
    frozen: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a drafter's folder.

    Args:
        folder: Created if it does not exist.
        config: Shape of the drafter.
        weights: State dict of a :class:`~paceline.drafter.methods.dspark.DSparkModel`.
        target: The target that it was trained for.
        layout: Project whose config.json is written. A ``paceline`` section holds what that project
            has no fields for.
        frozen: The target's embedding and LM head, ``[V, hidden]`` each, to be written too.
            DeepSpec's loader expects them; others read them from the target.
        dtype: Type of the tensors in the file.
        notes: Written to the ``paceline`` section as ``training``: how it was trained.

    Raises:
        UnsupportedModelError: The layout cannot express such a drafter.
    """
    described = write_config(config, layout, target)
    if layout is Layout.DEEPSPEC and frozen is None:
        raise UnsupportedModelError("a DeepSpec folder holds the target's embedding and LM head")
    tensors = dict(weights)
    if frozen is not None:
        tensors |= dict(zip((EMBEDDING, HEAD), frozen, strict=True))
    section = {name: getattr(config, name) for name in ("target_layers", "window", "state_input")}
    write_checkpoint(
        folder, METHOD, described, tensors, target, dtype=dtype, section=section, notes=notes
    )


def read_dspark(folder: str | Path, target_layers: int = 0) -> tuple[DSparkConfig, torch.dtype]:
    """Reads the shape of a drafter from its config.json, and the type for its tensors.

    Args:
        folder: The drafter's.
        target_layers: Number of layers of its target, which must match the folder's; 0: not known.

    Raises:
        UnsupportedModelError: It is no DSpark or DFlash drafter, needs an unsupported feature,
            lacks a field, or is for a target of another depth.
        FileNotFoundError: There is no config.json.
    """
    path = Path(folder) / CONFIG_FILE
    described = read_config_file(folder, METHOD)
    try:
        config = read_config(described, target_layers)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    weights = Checkpoint(folder, torch.float32)
    if "fc.weight" not in weights:
        raise UnsupportedModelError(
            f"{folder} has no tensor 'fc.weight', expected the names of a "
            f"{layout_of(described).value} drafter"
        )
    stored = weights.stored("fc.weight").dtype
    if stored not in _DTYPES:
        raise UnsupportedModelError(
            f"{folder} holds tensors of the type {stored}, expected one of {list(_DTYPES)}"
        )
    return config, _DTYPES[stored]


def load_weights(
    folder: str | Path,
    config: DSparkConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Reads all tensors of a drafter except the target's, by the names of a ``DSparkModel``.

    Raises:
        UnsupportedModelError: A tensor is missing, has another shape, or is not known, which means
            that the drafter has a part that its config.json does not describe.
    """
    found = Checkpoint(folder, dtype, device)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in DSparkModel(config).state_dict().items()}
    if unknown := sorted(set(found) - set(shapes) - _OTHER_TENSORS):
        raise UnsupportedModelError(
            f"{folder} holds the tensors {unknown[:5]}, which no DSpark drafter of its config.json "
            "has"
        )
    drafted = drafted_tokens(Path(folder), config)
    if drafted is not None:
        del shapes[DRAFT_TOKENS]
    weights = {name: take(found, name, shape) for name, shape in shapes.items()}
    return weights if drafted is None else {**weights, DRAFT_TOKENS: drafted.to(device)}
