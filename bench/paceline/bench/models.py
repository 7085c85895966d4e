"""A target and the drafters beside it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

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
