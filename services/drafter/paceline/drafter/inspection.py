"""Tells what a drafter's folder is, for which target, and whether it fits one; reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.decoder import UnsupportedModelError, load_config, open_model
from paceline.decoder.folder_files import check_fields, read_object
from paceline.drafter.methods.base import LoadError
from paceline.drafter.methods.checkpoint import (
    CONFIG_FILE,
    EMBEDDING,
    HEAD,
    check_shape,
    check_target,
    check_tensors,
    read_fit,
)
from paceline.drafter.methods.dspark import DSparkModel, read_dspark
from paceline.drafter.methods.dspark.config import layout_of
from paceline.drafter.methods.eagle3 import Eagle3Model, read_eagle3
from paceline.drafter.methods.eagle3.config import is_eagle3
from paceline.drafter.methods.layers import (
    SECTION,
    DrafterWeights,
    DraftModel,
    LayerShape,
    drafted_tokens,
)
from paceline.drafter.methods.longspec import LongSpecModel, read_longspec

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Inspection:
    """Facts about a folder, by name, and what prevents its use; none: it can be loaded."""

    facts: dict[str, str]
    problems: list[str]


def inspect_drafter(folder: Path, target: Path | None = None) -> Inspection:
    """Inspects a folder.

    Args:
        folder: The drafter's.
        target: Folder or file of a target that it is to fit; None: any.

    Raises:
        OSError: There is no config.json, or no target.
        ValueError: config.json is not JSON, or the target is not supported.
    """
    if not (folder / CONFIG_FILE).exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}")
    described = read_object(folder / CONFIG_FILE)
    if not isinstance(described.get(SECTION, {}), dict):
        raise ValueError(f"the '{SECTION}' of {folder / CONFIG_FILE} is no object")
    check_fields(folder / CONFIG_FILE, described)
    source = open_model(target) if target is not None else None
    layers = source.config().layers if source is not None else 0
    facts = {"method": "", "layout": ""}
    problems: list[str] = []
    try:
        facts["method"], facts["layout"], parts = _kind(described)
        if made_for := _made_for(described):
            facts["made for"] = made_for
        if parts is None:
            facts |= {"vocabulary": f"{load_config(folder).vocab_size:,} tokens"}
        else:
            read, model = parts
            config, _ = read(folder, layers)
            _check_own(folder, config)
            check_tensors(folder, config, model)
            drafted_tokens(folder, config)
            if source is not None:
                check_shape(folder, config, source)
        fit = read_fit(folder)
        if source is not None:
            check_target(folder, source, fit)
            facts["fits"] = str(target)
    except (UnsupportedModelError, LoadError) as error:
        problems.append(str(error))
    return Inspection(facts, problems)


Parts = tuple[Callable[[Path, int], tuple[Any, torch.dtype]], type[DraftModel]]
"""How the shape is read, and the module with the tensors."""


def _kind(described: Json) -> tuple[str, str, Parts | None]:
    """Method, layout and parts of a drafter; None: it is any model."""
    own = SECTION in described
    method = described[SECTION].get("method") if own else None
    if method == "longspec":
        return method, "paceline", (read_longspec, LongSpecModel)
    if is_eagle3(described):
        speculators = "speculators" if "speculators_model_type" in described else "EAGLE"
        return "eagle3", "paceline" if own else speculators, (read_eagle3, Eagle3Model)
    if method == "dspark" or described.get("speculators_model_type") or _is_block(described):
        layout = "paceline" if own else layout_of(described).value
        return "dspark", layout, (read_dspark, DSparkModel)
    return "lm", "transformers", None


def _is_block(described: Json) -> bool:
    with suppress(UnsupportedModelError):
        return bool(layout_of(described))
    return False


def _made_for(described: Json) -> str:
    verifier = (described.get("speculators_config") or {}).get("verifier") or {}
    fingerprint = (described.get(SECTION) or {}).get("target_fingerprint", "")
    named = str(verifier.get("name_or_path") or "")
    return f"{named} ({fingerprint[:12]})" if fingerprint else named


def _check_own(folder: Path, config: LayerShape) -> None:
    """Check the shapes of embedding and LM head, if the folder has its own."""
    weights = DrafterWeights(folder, torch.float32)
    kinds = ((EMBEDDING, {config.vocab_size}), (HEAD, {config.vocab_size, config.drafted}))
    for name, rows in kinds:
        if name in weights and weights.shape(name) not in {(n, config.hidden) for n in rows}:
            raise UnsupportedModelError(
                f"tensor {name!r} of {folder} has shape {weights.shape(name)}, expected "
                f"{(max(rows), config.hidden)}"
            )
