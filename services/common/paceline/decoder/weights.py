"""Reading weights from safetensors folders, and fingerprints of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.decoder.errors import UnsupportedModelError
from paceline.decoder.quantised import Weight

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READ_BYTES = 1 << 22


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder, in name order.

    Raises:
        UnsupportedModelError: The folder has no safetensors weights, or a shard is missing.
    """
    base = Path(folder)
    if (base / _INDEX).is_file():
        names = sorted(set(json.loads((base / _INDEX).read_text())["weight_map"].values()))
        for name in names:
            if Path(name).name != name or not (base / name).is_file():
                raise UnsupportedModelError(f"{base / _INDEX} names {name!r}, which does not exist")
        return [base / name for name in names]
    if (base / _SINGLE).is_file():
        return [base / _SINGLE]
    raise UnsupportedModelError(
        f"{base} has neither {_SINGLE} nor {_INDEX}; only safetensors weights are loaded"
    )


class Checkpoint(Mapping[str, Tensor]):
    """Tensors of a folder by name, each read on access and not cached."""

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Open the weight files of a folder; tensors come as ``dtype`` on ``device``.

        Raises:
            UnsupportedModelError: The folder has no safetensors weights, or a shard is missing.
        """
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in weight_files(folder):
            file: Any = safe_open(str(path), framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        self._dtype = dtype
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found.to(self._device, self._dtype, copy=True)  # a copy outlives the file

    def mapped(self, name: str) -> Tensor:
        """A tensor mapped from the file, whose page cache all processes share.

        It must not be changed, and the file must not be rewritten in place (replacing it is safe).
        If type or device differ from the file's, the tensor is a private copy.
        """
        found: Tensor = self._files[name].get_tensor(name)
        return found.to(self._device, self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


W = TypeVar("W", bound=Weight)


def take(weights: Mapping[str, W], name: str, shape: tuple[int, ...]) -> W:
    """One tensor, its presence and shape checked.

    Raises:
        UnsupportedModelError: Missing, or of another shape.
    """
    if name not in weights:
        raise UnsupportedModelError(f"the checkpoint lacks tensor {name!r}")
    found = weights[name]
    if tuple(found.shape) != shape:
        raise UnsupportedModelError(
            f"tensor {name!r} has shape {tuple(found.shape)}, expected {shape} by the config"
        )
    return found


def fingerprint_files(head: bytes, files: Iterable[Path]) -> str:
    """SHA-256 (hex) of some bytes and the content of files, in order."""
    digest = hashlib.sha256(head)
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
