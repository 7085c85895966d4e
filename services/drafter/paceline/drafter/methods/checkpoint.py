"""Model folders of drafters: their target and tokenizer, and loading from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from paceline.decoder import UnsupportedModelError, open_model, use_device
from paceline.decoder.sources import Origin
from paceline.drafter.methods.base import Fit, LoadError, Resources
from paceline.kernels import set_numerics

P = ParamSpec("P")
T = TypeVar("T")

TOKENIZER_FILE = "tokenizer.json"


def required_folder(method: str, folder: Path | None) -> Path:
    """Returns the folder or GGUF file of a method with weights.

    Raises:
        LoadError: FOLDER_MISSING: None was given.
    """
    if folder is None:
        raise LoadError("FOLDER_MISSING", f"{method} needs a model folder: {method}:DIR")
    return folder


def load_model(
    folder: Path, resources: Resources, load: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Calls ``load`` on a thread that ends afterwards, and returns its result.

    The OpenMP workers of a thread end with it. If they stayed, they and the drafting thread's own
    would outnumber the cores and slow every operation.

    Raises:
        LoadError: The loader's own, or UNSUPPORTED_MODEL for any other error.
    """
    threads = resources.threads or torch.get_num_threads()

    def prepare() -> None:
        torch.set_num_threads(threads)
        if resources.numerics is not None:
            set_numerics(resources.numerics)
        use_device(resources.device)

    try:
        with ThreadPoolExecutor(1, initializer=prepare) as pool:
            return pool.submit(load, *args, **kwargs).result()
    except LoadError:
        raise
    except Exception as error:  # damaged files make the libraries raise anything
        raise LoadError("UNSUPPORTED_MODEL", f"cannot load {folder}: {error}") from error


def weight_bytes(path: Path) -> int:
    """Returns the size of a model's weight files. Unit: bytes."""
    return open_model(path).weight_bytes


def read_fit(folder: Path) -> Fit:
    """Read which targets the drafter in a model folder or GGUF file fits.

    The ``paceline`` section of config.json may have a ``target_fingerprint``, a ``target_origin``
    and a ``tokenizer_digest``. Without the last one, the digest is that of the folder's
    tokenizer.json.

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
    found = open_model(folder).tokenizer_digest
    if declared and found and declared != found:
        raise LoadError(
            "TOKENIZER_MISMATCH",
            f"config.json of {folder} has the tokenizer_digest {declared}, but that of "
            f"{TOKENIZER_FILE} is {found}; restore the one the drafter was trained with",
        )
    origin = section.get("target_origin")
    return Fit(
        target_fingerprint=str(section.get("target_fingerprint", "")),
        target_origin=Origin.parse(origin) if isinstance(origin, dict) else None,
        tokenizer_digest=declared or found,
        vocab_size=_vocab_size(config, folder),
    )


def _read_gguf_fit(file: Path) -> Fit:
    try:
        source = open_model(file)
        vocab_size = source.config().vocab_size
        return Fit(tokenizer_digest=source.tokenizer_digest, vocab_size=vocab_size)
    except UnsupportedModelError as error:
        raise LoadError("UNSUPPORTED_MODEL", str(error)) from error


def check_target(folder: Path, target: Path, fit: Fit) -> Fit:
    """Check that the drafter in ``folder`` was trained for the target in ``target``.

    Another format of that target fits too.

    Returns:
        The fit to ``target`` itself.

    Raises:
        LoadError: TARGET_MISMATCH or TOKENIZER_MISMATCH.
    """
    source = open_model(target)
    if fit.target_origin is not None and fit.target_origin.fits(Origin.of(source)):
        return replace(
            fit,
            target_fingerprint=source.fingerprint(),
            tokenizer_digest=source.tokenizer_digest,
        )
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
    return fit


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
