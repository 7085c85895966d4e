"""Folders with matrices in blocks of 32 inputs, which other software does not read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.convert.weights import (
    MINIMUM,
    SCALE,
    SINGLE,
    Checkpoint,
    quantise_tensor,
    weight_files,
)
from paceline.decoder import UnsupportedModelError
from paceline.kernels.quantised import QUANT_BLOCK


def store_blocks(folder: Path, int4: Sequence[str] = ()) -> None:
    """Rewrite the safetensors file of a folder with its matrices in blocks of 32 inputs.

    A matrix ``NAME`` becomes int8 ``NAME`` and float16 ``NAME.scale``: one scale for 32 inputs, by
    the rule of llama.cpp's Q8_0. Matrices whose names contain a string of ``int4`` become 4 bits
    with float16 ``NAME.scale`` and ``NAME.minimum`` (:func:`paceline.kernels.quantised.quantise`):
    a block of ``NAME``, uint8 ``[outs, ins / 2]``, has its first 16 inputs in the low halves of its
    bytes and the others in the high ones, as in llama.cpp's Q4_1. Other tensors of floats become
    bfloat16, and so do matrices whose inputs are not a multiple of 32. :func:`plain_folder` writes
    a folder that other software reads. Raises ``UnsupportedModelError``: the folder has no weight
    file or several, or a weight is too large for a float16 scale.
    """
    from safetensors.torch import save_file

    file = folder / SINGLE
    if weight_files(folder) != [file]:
        raise UnsupportedModelError(f"the weights of {folder} are in several files, expected one")
    weights, stored = Checkpoint(folder, torch.float32), dict[str, Tensor]()
    for name in weights:
        tensor = weights.stored(name)
        if not tensor.is_floating_point():
            stored[name] = tensor
        elif tensor.ndim != 2 or tensor.shape[1] % QUANT_BLOCK:
            stored[name] = tensor.bfloat16()
        elif any(part in name for part in int4):
            blocks = quantise_tensor(name, tensor, 4)
            assert blocks.minimum is not None
            low, high = blocks.values.view(len(tensor), -1, 2, QUANT_BLOCK // 2).unbind(2)
            stored[name] = (low | high << 4).flatten(1)
            stored[name + SCALE] = blocks.scale.half()
            stored[name + MINIMUM] = blocks.minimum.half()
        else:
            blocks = quantise_tensor(name, tensor, 8)
            stored[name] = (blocks.values.to(torch.int16) - blocks.offset).to(torch.int8)
            stored[name + SCALE] = blocks.scale.half()
    fresh = file.with_suffix(".partial")
    form = "paceline-int4" if any(name.endswith(MINIMUM) for name in stored) else "paceline-int8"
    save_file(stored, fresh, metadata={"format": form})
    fresh.replace(file)


def plain_folder(folder: Path, copy: Path) -> Path:
    """Return a folder of the same model that transformers reads: ``folder`` itself, unless its
    weights are in blocks. Then ``copy``, which is written with plain bfloat16 tensors."""
    from safetensors.torch import save_file

    weights = Checkpoint(folder, torch.bfloat16)
    if not weights.bits:
        return folder
    copy.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != SINGLE:
            shutil.copyfile(path, copy / path.name)
    tensors = {name: weights.stored(name) for name in weights}
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    return copy
