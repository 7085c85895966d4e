"""A stretched target: a small target's function at a large target's cost.

Layers whose output projections are zero add exactly nothing, and neither do feed-forward columns
whose weights are zero. So a stretched target writes the small one's text, and a drafter trained for
the small one drafts for it as well as ever, while a step reads all weights of a model of that size.
It stands in for a large target that nobody can train on a laptop: accepted lengths are real, and so
are times; only that a model of that size would write so simple a text is made up.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.decoder import weights_fingerprint

LAYERS, INTERMEDIATE = 24, 14336
"""With the demo target's width of 384: 0.41 billion parameters, layers as in a 0.5B model."""

_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def stretch(
    target: Path, folder: Path, *, layers: int = LAYERS, intermediate: int = INTERMEDIATE
) -> None:
    """Write a stretched copy of a Llama-type target.

    New layers stand before the last one, which stays last: that is the one whose keys and values a
    LongSpec layer reads.

    Args:
        target: Its folder, with one weight file.
        folder: Made if it is not there.
        layers: Layers of the copy.
        intermediate: Width of its feed-forward blocks.

    Raises:
        ValueError: It is of another type, or larger than its copy would be.
    """
    config = json.loads((target / "config.json").read_text())
    depth = config["num_hidden_layers"]
    if config["model_type"] != "llama" or config.get("mlp_bias"):
        raise ValueError(
            f"{target} is no Llama-type model without biases: only those are stretched"
        )
    if layers < depth or intermediate < config["intermediate_size"]:
        raise ValueError(
            f"{target} has {depth} layers of width {config['intermediate_size']}: the copy cannot "
            f"have {layers} of {intermediate}"
        )
    weights = load_file(target / "model.safetensors")
    last = depth - 1
    origins = [*range(last), *[max(0, last - 1)] * (layers - depth), last]
    stretched = {n: t for n, t in weights.items() if not n.startswith("model.layers.")}
    for index, origin in enumerate(origins):
        added = last <= index < layers - 1
        for name, tensor in _layer(weights, origin, intermediate).items():
            silent = added and name in _OUTPUTS
            stretched[f"model.layers.{index}.{name}"] = tensor * 0 if silent else tensor.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stretched, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": layers, "intermediate_size": intermediate}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(target / name, folder / name)


def fit_drafter(drafter: Path, stretched: Path, folder: Path) -> None:
    """Write a copy of a LongSpec or DSpark drafter of the small target for the stretched one.

    Only what config.json says of the target changes. A LongSpec layer reads the last layer, which
    stays last; a DSpark drafter others, which keep their numbers.

    Raises:
        ValueError: It reads another layer than that.
    """
    config = json.loads((drafter / "config.json").read_text())
    section = config["paceline"]
    last = section["target_layers"] - 1
    layers = json.loads((stretched / "config.json").read_text())["num_hidden_layers"]
    if section["method"] == "longspec":
        if section["target_layer"] != last:
            raise ValueError(f"{drafter} reads layer {section['target_layer']}, expected the last")
        section["target_layer"] = layers - 1
    elif max(taps := config["aux_hidden_state_layer_ids"]) > last:
        raise ValueError(f"{drafter} reads states {taps}, expected none of the last layer")
    section |= {
        "target_layers": layers,
        "target_fingerprint": weights_fingerprint(stretched),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(drafter / "model.safetensors", folder / "model.safetensors")


def _layer(weights: dict[str, Tensor], index: int, intermediate: int) -> dict[str, Tensor]:
    """A layer by names without their prefix, its feed-forward block widened."""
    prefix = f"model.layers.{index}."
    layer = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    down = layer["mlp.down_proj.weight"]
    width = down.shape[1]
    # oneDNN adds up 1024 columns as two halves, and more than that in blocks of 1024. Beginning in
    # the middle of the first block, the sums are the same two halves, to the last bit.
    start = min(width // 2, intermediate - width)
    columns = (torch.arange(intermediate) - start) % width
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        layer[name] = layer[name][columns]
    layer["mlp.down_proj.weight"] = down.new_zeros(down.shape[0], intermediate)
    layer["mlp.down_proj.weight"][:, start : start + width] = down
    return layer
