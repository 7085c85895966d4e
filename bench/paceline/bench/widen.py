"""Makes a model wider with zeros: the same tokens and drafts at the cost of a larger model.

Hidden states, heads and feed-forward blocks get FACTOR times as many entries. A norm over zeros has
a mean square that is FACTOR times smaller, so its epsilon is divided by FACTOR and its weight by
the root of it. A norm over a head is as wide as before: there the head's projection is divided by
the root instead. These divisions are exact for powers of 4.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.cli.command import CommandError
from paceline.convert import open_model
from paceline.convert.drafters import HF_FIELDS
from paceline.convert.sources import ModelFolder
from paceline.convert.weights import weight_files
from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.base import SECTION, LoadError
from paceline.drafter.methods.checkpoint import TargetRef, check_target, read_fit
from paceline.kernels.quantised import QUANT_BLOCK

_COPIED = (".json", ".jinja", ".txt", ".model")
_SCALE, _MINIMUM = ".scale", ".minimum"
_SHARD_BYTES = 256 << 20
_INDEX = "model.safetensors.index.json"
# Parts whose tensors have no widened dimension.
_KEPT = ("markov_w1", "markov_w2", "q_norm", "k_norm", "d2t", "t2d")
Axis = list[tuple[int, int]]  # the parts of a dimension, each with its size before and after


def run(args: argparse.Namespace) -> int:
    """Write OUTPUT/target, and OUTPUT/NAME for each drafter folder."""
    target, output = args.target, args.output
    try:
        if not isinstance(open_model(target), ModelFolder):
            raise CommandError(
                f"{target} is no Hugging Face folder; `paceline fetch NAME --format folder` makes "
                "one of a named model"
            )
        for folder in args.drafter:
            check_target(folder, target, read_fit(folder))
        count = _widen(target, output / "target", args.factor)
        print(f"{output / 'target'}: {count / 1e9:.2f} B parameters")
        made = TargetRef.of(output / "target") if args.drafter else None
        for folder in args.drafter:
            count = _widen(folder, output / folder.resolve().name, args.factor, made)
            print(f"{output / folder.resolve().name}: {count / 1e6:.0f} M parameters")
    except (LoadError, UnsupportedModelError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0


def _widen(folder: Path, output: Path, factor: int, target: TargetRef | None = None) -> int:
    """Write a wider model folder; returns its parameters.

    Args:
        folder: Of a target, or of a drafter in any format that has weights.
    """
    from safetensors import safe_open

    output.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix in _COPIED and file.name not in ("config.json", _INDEX):
            shutil.copy(file, output)
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())
    section = described.get(SECTION)
    shape: dict[str, Any] = {} if section is None else section["shape"]
    if "hidden_size" in described:  # a file may leave defaults out
        config = open_model(folder).config()
        described.update(
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
        )
    hidden = shape["hidden"] if shape else described["hidden_size"]
    for name in ("hidden", "intermediate", "q_heads", "kv_heads"):
        for fields, key in ((described, HF_FIELDS[name]), (shape, name)):
            if key in fields:
                fields[key] *= factor
    for fields, key in ((described, "rms_norm_eps"), (shape, "norm_eps")):
        if key in fields:
            fields[key] /= factor
    if section is not None and target is not None:
        section["target_fingerprint"] = target.fingerprint
        section["target_origin"] = None if target.origin is None else asdict(target.origin)
    (output / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    files: list[Any] = [safe_open(str(path), framework="pt") for path in weight_files(folder)]
    return _write(output, _tensors(files, hidden, factor), files[0].metadata())


def _tensors(files: list[Any], hidden: int, factor: int) -> Iterator[tuple[str, Tensor]]:
    """Name and content of each wider tensor of safetensors files."""
    names = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118  no mapping
    known = {name for name, _ in names}
    divided = {"q_proj", "k_proj"} if any(_part(name) == "q_norm" for name in known) else set()
    for name, file in names:
        tensor: Tensor = file.get_tensor(name)
        part, inputs = _part(name), 1
        if name.endswith((_SCALE, _MINIMUM)):
            inputs = QUANT_BLOCK
        elif name + _MINIMUM in known:
            inputs = 2
        wide = _placed(tensor, _axes(name, tensor.shape, hidden // inputs, factor))
        is_norm = part.endswith("norm") and part not in _KEPT
        if (is_norm or part in divided) and name + _SCALE not in known:
            wide = (wide.float() / math.sqrt(factor)).to(wide.dtype)
        yield name, wide


def _part(name: str) -> str:
    """The part of the model that a tensor is of: q_proj, norm, ..."""
    stem = (
        name.removesuffix(_SCALE)
        .removesuffix(_MINIMUM)
        .removesuffix(".weight")
        .removesuffix(".bias")
    )
    return stem.rpartition(".")[2]


def _axes(name: str, shape: torch.Size, hidden: int, factor: int) -> list[Axis]:
    """The parts of each dimension of a tensor; ``hidden`` is the width of the hidden states."""

    def wide(size: int) -> Axis:
        return [(size, size * factor)]

    def same(size: int) -> Axis:
        return [(size, size)] if size else []

    part, rows, columns = _part(name), shape[0], shape[-1]
    of_head = name.startswith(("markov_head.", "confidence_head."))
    if part in _KEPT or (of_head and len(shape) == 1):
        return [same(size) for size in shape]
    if part in ("q_proj", "k_proj", "v_proj") and columns == 2 * hidden:  # EAGLE-3
        return [wide(rows), wide(hidden) * 2]
    if part == "fc":
        return [wide(rows), wide(hidden) * (columns // hidden)]
    if part in ("embed_tokens", "lm_head"):
        return [same(rows), wide(columns)]
    if part == "joint_proj":
        return [same(rows), same(columns - hidden) + wide(hidden)]
    if of_head:
        return [same(rows), wide(hidden) + same(columns - hidden)]
    return [wide(size) for size in shape]


def _placed(tensor: Tensor, axes: list[Axis]) -> Tensor:
    places = []
    for axis in axes:
        begin, found = 0, []
        for size, new in axis:
            found.append(torch.arange(begin, begin + size))
            begin += new
        places.append(torch.cat(found))
    wide = tensor.new_zeros([sum(new for _, new in axis) for axis in axes])
    if len(places) == 2:
        places[0] = places[0][:, None]
    wide[tuple(places)] = tensor
    return wide


def _write(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str] | None
) -> int:
    """Write tensors to files of some 256 MiB, with an index; returns the number of parameters."""
    from safetensors.torch import save_file

    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    parameters = files = 0

    def save() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05}.safetensors"
        save_file(shard, folder / name, metadata)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor
        if not name.endswith((_SCALE, _MINIMUM)):
            parameters += tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1)
        if sum(each.nbytes for each in shard.values()) > _SHARD_BYTES:
            save()
    save()
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1))
    return parameters
