"""The target and the prompts of a benchmark."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.cli.command import CommandError
from paceline.convert import open_model
from paceline.kernels.quantised import QuantisedMatrix

_MATRIX = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Models:
    folder: Path  # may hold a target and prompts
    target: Path  # Hugging Face folder or GGUF file

    @classmethod
    def of(cls, args: argparse.Namespace) -> Models:
        """Models of the options `--models` and `--target`.

        Raises:
            CommandError: `--weights` asks for 8 bits of a file with 4, which would keep its 4 bits.
        """
        target = args.target or args.models / "target"
        if "int8" in getattr(args, "weights", ()) and target.is_file():
            found = open_model(target).tensors(torch.bfloat16, "cpu")[_MATRIX]
            if isinstance(found, QuantisedMatrix) and found.bits < 8:
                raise CommandError(
                    f"{target.name} has {found.bits}-bit weights, which --weights int8 keeps: use "
                    "int4, or a folder (`paceline fetch NAME --format folder`)"
                )
        return cls(args.models, target)

    @property
    def prompts(self) -> Path:
        """The folder's own prompts, or those of the demo."""
        own = self.folder / "prompts"
        return own if own.is_dir() else Path("models/demo/prompts")
