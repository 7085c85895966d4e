"""The target and the prompts of a benchmark."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Models:
    folder: Path  # may hold a target and prompts
    target: Path  # Hugging Face folder or GGUF file

    @classmethod
    def of(cls, args: argparse.Namespace) -> Models:
        """Return the models of the options `--models` and `--target`."""
        target = args.target or args.models / "target"
        return cls(args.models, target)

    @property
    def prompts(self) -> Path:
        """The folder's own prompts, or those of the demo."""
        prompts = self.folder / "prompts"
        return prompts if prompts.is_dir() else Path("models/demo/prompts")
