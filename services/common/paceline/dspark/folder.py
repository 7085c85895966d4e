"""The folder of a DSpark drafter: read in either layout, written in either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError
from paceline.decoder.weights import Checkpoint, take, weight_files
from paceline.dspark.config import DSparkConfig
from paceline.dspark.layouts import SECTION, Layout, describe, layout_of, read_config
from paceline.dspark.module import DSparkModel
from paceline.longspec import TargetRef
from paceline.longspec.folder import CONFIG_FILE, EMBEDDING, HEAD, WEIGHTS_FILE

__all__ = ["Layout", "load_weights", "read_dspark", "save_dspark"]

METHOD = "dspark"

FORMAT = 1
"""Of the ``paceline`` section. A folder of another one is refused."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.bfloat16}
_NOT_OURS = frozenset({EMBEDDING, HEAD, "t2d", "d2t"})
"""Tensors that a folder may hold besides: the target's own, and maps between vocabularies."""


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
    """Write a drafter's folder.

    Args:
        folder: Made if it is not there.
        config: Shape of the drafter.
        weights: State dict of a :class:`~paceline.dspark.DSparkModel`.
        target: What it was trained for.
        layout: Whose config.json to write. A ``paceline`` section says what it has no words for.
        frozen: The target's embedding and LM head, ``[V, hidden]`` each, to be written too:
            DeepSpec's loader expects them, others take them from the target.
        dtype: Type of the tensors in the file.
        notes: Goes into the ``paceline`` section as ``training``: how the drafter came about.

    Raises:
        UnsupportedModelError: The layout cannot tell such a drafter.
    """
    from safetensors.torch import save_file

    described = describe(config, layout)
    if layout is Layout.SPECULATORS:
        described["speculators_config"]["verifier"] = {
            "name_or_path": target.name,
            "architectures": list(target.architectures),
        }
    elif frozen is None:
        raise UnsupportedModelError("a DeepSpec folder holds the target's embedding and LM head")
    described["dtype"] = str(dtype).removeprefix("torch.")
    section: dict[str, Any] = {
        "method": METHOD,
        "format": FORMAT,
        "target_layers": config.target_layers,
        "window": config.window,
        "target_fingerprint": target.fingerprint,
        "tokenizer_digest": target.tokenizer_digest,
    }
    if notes:
        section["training"] = dict(notes)
    described[SECTION] = section
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights)
    if frozen is not None:
        tensors |= dict(zip((EMBEDDING, HEAD), frozen, strict=True))
    # Copies: a tied embedding and head share memory, which the file format does not allow.
    copies = {n: t.detach().to("cpu", dtype, copy=True).contiguous() for n, t in tensors.items()}
    save_file(copies, base / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(described, indent=2, sort_keys=True)
    (base / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def read_dspark(folder: str | Path, target_layers: int = 0) -> tuple[DSparkConfig, torch.dtype]:
    """Shape of a drafter from its config.json, and what type to read its tensors in.

    Args:
        folder: Of the drafter.
        target_layers: Layers of its target; 0: not known, and only checked where the folder says.

    Raises:
        UnsupportedModelError: It is no DSpark or DFlash drafter, needs what is not built, leaves
            open what must be known, or is for a target of another depth.
        FileNotFoundError: There is no config.json.
    """
    from safetensors import safe_open

    path = Path(folder) / CONFIG_FILE
    described = json.loads(path.read_text(encoding="utf-8"))
    section = described.get(SECTION)
    if section is not None and (section.get("method"), section.get("format")) != (METHOD, FORMAT):
        raise UnsupportedModelError(
            f"{path} is of method {section.get('method')!r}, format {section.get('format')!r}; "
            f"expected {METHOD!r}, format {FORMAT}"
        )
    try:
        config = read_config(described, target_layers)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as tensors:
            if "fc.weight" in tensors.keys():  # noqa: SIM118 - it is no mapping
                stored = tensors.get_slice("fc.weight").get_dtype()
                if stored in _DTYPES:
                    return config, _DTYPES[stored]
                raise UnsupportedModelError(
                    f"{file} holds tensors of the type {stored}, expected one of {list(_DTYPES)}"
                )
    raise UnsupportedModelError(
        f"{folder} has no tensor 'fc.weight', expected the names of a {layout_of(described).value} "
        "drafter"
    )


def load_weights(
    folder: str | Path,
    config: DSparkConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """All tensors of a drafter but the target's, by the names of a ``DSparkModel``.

    Raises:
        UnsupportedModelError: One is missing, of another shape, or not known: then the drafter does
            something that its config.json does not tell.
    """
    found = Checkpoint(folder, dtype, device)
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in DSparkModel(config).state_dict().items()}
    if unknown := sorted(set(found) - set(wanted) - _NOT_OURS):
        raise UnsupportedModelError(
            f"{folder} holds the tensors {unknown[:5]}, which no DSpark drafter of its config.json "
            "has"
        )
    return {name: take(found, name, shape) for name, shape in wanted.items()}
