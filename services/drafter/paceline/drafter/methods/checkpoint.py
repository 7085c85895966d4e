"""Model folders of drafters: their target, tokenizer and calibration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from paceline.drafter.calibration import Calibration
from paceline.drafter.methods.base import Fit, LoadError

TOKENIZER_FILE = "tokenizer.json"


def read_fit(folder: Path) -> Fit:
    """Read which targets the drafter in a model folder or GGUF file fits.

    The ``paceline`` section of config.json may have a ``target_fingerprint`` and a
    ``tokenizer_digest``. Without the latter, the digest is that of the folder's tokenizer.json.

    Raises:
        LoadError: There is no valid config.json or no safetensors file, the digest in
            config.json is not that of tokenizer.json, or a GGUF file is damaged.
    """
    if folder.is_file():
        return _read_gguf_fit(folder)
    config = _read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise LoadError(
            "NO_SAFETENSORS",
            f"{folder} has no *.safetensors file; convert weights of other formats to it",
        )
    section = config.get("paceline", {})
    declared = str(section.get("tokenizer_digest", ""))
    tokenizer = folder / TOKENIZER_FILE
    found = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
    if declared and found and declared != found:
        raise LoadError(
            "TOKENIZER_MISMATCH",
            f"config.json of {folder} has the tokenizer_digest {declared}, but that of "
            f"{TOKENIZER_FILE} is {found}; restore the one the drafter was trained with",
        )
    return Fit(
        target_fingerprint=str(section.get("target_fingerprint", "")),
        tokenizer_digest=declared or found,
        vocab_size=_vocab_size(config, folder),
    )


def _read_gguf_fit(file: Path) -> Fit:
    from paceline.decoder import UnsupportedModelError, open_model

    try:
        source = open_model(file)
        vocab_size = source.config().vocab_size
        return Fit(tokenizer_digest=source.tokenizer_digest, vocab_size=vocab_size)
    except UnsupportedModelError as error:
        raise LoadError("UNSUPPORTED_MODEL", str(error)) from error


def check_target(folder: Path, target: Path, fit: Fit) -> None:
    """Check that the drafter in ``folder`` was trained for the target in ``target``.

    Raises:
        LoadError: TARGET_MISMATCH or TOKENIZER_MISMATCH.
    """
    from paceline.decoder import open_model  # here, since other methods need no torch

    source = open_model(target)
    pairs = (
        ("TARGET_MISMATCH", "weights", fit.target_fingerprint, source.fingerprint()),
        ("TOKENIZER_MISMATCH", "the tokenizer", fit.tokenizer_digest, source.tokenizer_digest),
    )
    for reason, what, expected, found in pairs:
        if expected and expected != found:
            raise LoadError(
                reason,
                f"{folder} was made for a target with {what} {expected}, but {target} has "
                f"{found or 'none'}; give the target it was trained for",
            )


def read_calibration(path: Path, method: str) -> Calibration:
    """Read the calibration of a drafter.

    Raises:
        LoadError: The file cannot be read, is malformed, or is for another method.
    """
    try:
        found = Calibration.read(path)
    except (OSError, ValueError) as error:
        raise LoadError(
            "UNREADABLE_CALIBRATION",
            f"cannot read the calibration {path}: {error}; create one with paceline calibrate",
        ) from error
    if found.method != method:
        raise LoadError(
            "OTHER_CALIBRATION",
            f"{path} is for the method {found.method!r}, the drafter's is {method!r}; calibrate "
            "this drafter",
        )
    return found


def _vocab_size(config: dict[str, Any], folder: Path) -> int:
    layer = config.get("transformer_layer_config")  # where the speculators format has it
    size = config.get("vocab_size", layer.get("vocab_size") if isinstance(layer, dict) else None)
    if not isinstance(size, int) or size <= 0:
        raise LoadError(
            "NO_CONFIG", f"config.json of {folder} has the vocab_size {size!r}, expected a number"
        )
    return size


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(
            "NO_CONFIG", f"cannot read {path}: {error}; expected a Hugging Face model folder"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("paceline", {}), dict):
        raise LoadError("NO_CONFIG", f"{path} is not an object, or its 'paceline' section is not")
    return config
