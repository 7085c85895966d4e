"""A target and the drafters beside it, and copies of them for longer contexts."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.decoder import weights_fingerprint

_CONFIG = "config.json"
_TRAINED = ("lm", "longspec", "dspark")
_SELFSPEC = "kv_policy=verified,ratio=0.07,context=64,share_weights=always"


@dataclass(frozen=True)
class Models:
    """Model folders.

    Attributes:
        folder: Holds any of the drafters ``lm``, ``longspec`` and ``dspark``.
        target: A Hugging Face folder.
    """

    folder: Path
    target: Path

    @classmethod
    def of(cls, args: argparse.Namespace) -> Models:
        """Models of the options `--models` and `--target`."""
        return cls(args.models, args.target or args.models / "target")

    @property
    def prompts(self) -> Path:
        """The folder's own prompts, or those of the demo."""
        own = self.folder / "prompts"
        return own if own.is_dir() else Path("models/demo/prompts")

    @property
    def trained(self) -> dict[str, Path]:
        """Folders of drafters with weights, by method."""
        folders = ((name, self.folder / name) for name in _TRAINED)
        return {name: path for name, path in folders if (path / _CONFIG).exists()}

    @property
    def drafters(self) -> dict[str, str]:
        """Specifications METHOD[:DIR][,KEY=VALUE...] by name."""
        suffix = {"lm": "", **dict.fromkeys(("longspec", "dspark"), f",target={self.target}")}
        return {
            "ngram": "ngram",
            **{name: f"{name}:{path}{suffix[name]}" for name, path in self.trained.items()},
            "selfspec": f"selfspec:{self.target},{_SELFSPEC}",
        }

    @property
    def max_position(self) -> int:
        """Longest text of the target, in tokens."""
        config = json.loads((self.target / _CONFIG).read_text())
        return int(config["max_position_embeddings"])

    def for_context(self, context: int, work: Path) -> Models:
        """These models, or copies in `work` with RoPE scaled by YaRN if the context is longer."""
        factor = max(1, -(-context // self.max_position))
        if factor == 1:
            return self
        folder = work / f"longer-{factor}"
        copy = Models(folder, folder / "target")
        lengthen(self.target, copy.target, factor)
        for name, path in self.trained.items():
            lengthen(path, folder / name, factor, None if name == "lm" else copy.target)
        return copy


def lengthen(folder: Path, copy: Path, factor: int, target: Path | None = None) -> None:
    """Copy a model folder and scale its RoPE by YaRN for a context `factor` times as long.

    Args:
        folder: A Hugging Face model, or a drafter in the speculators layout.
        copy: The folder to write.
        factor: By how much the context grows.
        target: The lengthened target of a drafter, whose fingerprint the copy gets.

    Raises:
        ValueError: The folder's RoPE is scaled already.
    """
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / _CONFIG).read_text())
    shape: dict[str, Any] = config.get("transformer_layer_config", config)
    rope, context = shape["rope_parameters"], shape["max_position_embeddings"]
    if rope["rope_type"] != "default":
        raise ValueError(f"{folder} scales its RoPE already: {rope}; expected rope_type 'default'")
    shape["rope_parameters"] = {
        **rope,
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": context,
    }
    shape["max_position_embeddings"] = context * factor
    if target is not None:
        config["paceline"]["target_fingerprint"] = weights_fingerprint(target)
    (copy / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
