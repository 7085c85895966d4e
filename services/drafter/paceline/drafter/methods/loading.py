"""Loading the model of a method."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from paceline.decoder import open_model, use_device
from paceline.drafter.methods.base import LoadError, Resources

P = ParamSpec("P")
T = TypeVar("T")


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
