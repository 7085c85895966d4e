"""The folder of a LongSpec drafter, in the speculators format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.decoder import UnsupportedModelError, weights_fingerprint
from paceline.longspec.config import LongSpecConfig

METHOD = "longspec"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

FORMAT = 1
"""Of the ``paceline`` section. A folder of another one is refused."""

SPECULATORS_VERSION = "0.6.0"
"""Whose config.json ours follows. It has no type of its own for this method."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Names of the target's frozen tensors, should a folder hold them: they are never written here."""


@dataclass(frozen=True)
class TargetRef:
    """The target a drafter was made for.

    Attributes:
        name: What people call it: the name of its folder, never a path.
        architectures: From its config.json.
        fingerprint: See :func:`paceline.decoder.weights_fingerprint`.
        tokenizer_digest: SHA-256 hex of its tokenizer.json; empty if it has none.
    """

    name: str
    architectures: tuple[str, ...]
    fingerprint: str
    tokenizer_digest: str

    @classmethod
    def of(cls, folder: str | Path) -> TargetRef:
        """Read a target's folder, all its weights among it.

        Raises:
            UnsupportedModelError: There are no safetensors weights.
            FileNotFoundError: There is no config.json.
        """
        base = Path(folder)
        config = json.loads((base / CONFIG_FILE).read_text(encoding="utf-8"))
        return cls(
            name=base.resolve().name,
            architectures=tuple(config.get("architectures") or ()),
            fingerprint=weights_fingerprint(base),
            tokenizer_digest=tokenizer_digest(base),
        )


def tokenizer_digest(folder: str | Path) -> str:
    """SHA-256 hex of a folder's tokenizer.json; empty if there is none."""
    path = Path(folder) / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


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

    Args:
        folder: Made if it is not there.
        config: Shape of the layer.
        weights: State dict of a :class:`~paceline.longspec.LongSpecModel`.
        target: What it was trained for.
        levels: Depth it was trained to draft to. Unit: tokens.
        dtype: Type of the tensors in the file: the target's, as a rule.
        notes: Goes into the ``paceline`` section as ``training``: how the drafter came about.
    """
    from safetensors.torch import save_file

    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    layer, rest = config.to_json()
    section: dict[str, Any] = {
        "method": METHOD,
        "format": FORMAT,
        **rest,
        "target_fingerprint": target.fingerprint,
        "tokenizer_digest": target.tokenizer_digest,
    }
    if notes:
        section["training"] = dict(notes)
    proposal = {"proposal_type": "tree", "speculative_tokens": levels}
    described = {
        "architectures": ["LongSpecModel"],
        "speculators_model_type": METHOD,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": METHOD,
            "proposal_methods": [proposal],
            "default_proposal_method": proposal["proposal_type"],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.architectures),
            },
        },
        "transformer_layer_config": layer,
        "dtype": str(dtype).removeprefix("torch."),
        "paceline": section,
    }
    tensors = {name: each.detach().to("cpu", dtype).contiguous() for name, each in weights.items()}
    save_file(tensors, base / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(described, indent=2, sort_keys=True)
    (base / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def read_longspec(folder: str | Path) -> tuple[LongSpecConfig, torch.dtype]:
    """Shape of a drafter's layer, and the type of its tensors, from its config.json.

    Raises:
        UnsupportedModelError: It is no LongSpec drafter, of another format, or does not say what
            it must.
        FileNotFoundError: There is no config.json.
    """
    path = Path(folder) / CONFIG_FILE
    described = json.loads(path.read_text(encoding="utf-8"))
    section, layer = described.get("paceline"), described.get("transformer_layer_config")
    if not isinstance(section, dict) or not isinstance(layer, dict):
        raise UnsupportedModelError(
            f"{path} has no 'paceline' section or no 'transformer_layer_config', expected a folder "
            "written by paceline's training"
        )
    if section.get("method") != METHOD or section.get("format") != FORMAT:
        raise UnsupportedModelError(
            f"{path} is of method {section.get('method')!r}, format {section.get('format')!r}; "
            f"expected {METHOD!r}, format {FORMAT}"
        )
    dtype = getattr(torch, str(described.get("dtype")), None)
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedModelError(
            f"{path} has the dtype {described.get('dtype')!r}, expected float32 or bfloat16"
        )
    return LongSpecConfig.from_json(layer, section), dtype
