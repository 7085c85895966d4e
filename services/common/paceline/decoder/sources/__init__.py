"""Models on disk: Hugging Face folders and GGUF files behind one interface."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.decoder.config import DecoderConfig
from paceline.decoder.sources.base import ModelSource
from paceline.decoder.sources.folder import ModelFolder
from paceline.decoder.sources.origin import Origin

__all__ = [
    "ModelFolder",
    "ModelSource",
    "Origin",
    "load_config",
    "open_model",
    "weights_fingerprint",
]


def open_model(path: str | Path) -> ModelSource:
    """A model folder, or a GGUF file, whose structure is checked.

    Raises:
        UnsupportedModelError: The file is damaged or of a kind that is not supported.
        FileNotFoundError: There is no such file, or the folder has no config.json.
    """
    found = Path(path)
    if found.is_file() or found.suffix == ".gguf":
        from paceline.decoder.sources.gguf import GgufModel

        return GgufModel(found)
    return ModelFolder(found)


def load_config(path: str | Path, weights: torch.dtype | str = "auto") -> DecoderConfig:
    """The configuration of a model; see :func:`open_model` and :meth:`ModelSource.config`."""
    return open_model(path).config(weights)


def weights_fingerprint(path: str | Path) -> str:
    """SHA-256 (hex) of a model.

    Of a folder: its config.json and the bytes of its weight files, in order. The config is hashed
    as canonical JSON without fields that tools rewrite. So copying or reformatting a folder does
    not change the fingerprint; any change of a weight does. Of a GGUF file: all its bytes.
    """
    return open_model(path).fingerprint()
