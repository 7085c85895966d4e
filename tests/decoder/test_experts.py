"""Routed experts: layouts of folders, blocks, bits of trees, and mixtures that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_cases import ask_tree, expected_logits, extend, path_to, random_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.decoder import Decoder, LocalCache, UnsupportedModelError
from paceline.decoder.experts import Experts
from paceline.decoder.weights import Linear
from paceline.kernels import CpuKernels

MIXTURES = ["qwen3-moe", "mixtral"]
PARENTS = (-1, 0, 0, 1, 2, 2, 3, 6, 7, 5)


def logits(folder: Path) -> Tensor:
    decoder = Decoder.load(folder)
    return extend(decoder, LocalCache(decoder.config), random_tokens(40))


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a folder with other tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("name", MIXTURES)
def test_one_tensor_of_all_experts_loads_like_one_of_each(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models[name])
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), logits(models[name]))


@pytest.mark.bits
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_tree_in_blocks_has_the_bits_of_decoding(models: dict[str, Path], weights: str) -> None:
    decoder = Decoder.load(models["qwen3-moe"], weights)
    prompt, tree = random_tokens(37), random_tokens(len(PARENTS), 1)
    cache = LocalCache(decoder.config)
    extend(decoder, cache, prompt)
    found = ask_tree(decoder, cache, tree, PARENTS)
    for leaf in (4, 8, 9):
        path, alone = path_to(PARENTS, leaf), LocalCache(decoder.config)
        extend(decoder, alone, prompt)
        assert torch.equal(extend(decoder, alone, tree[path], max_tokens=1), found[path])


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_gpus_are_those_of_each_expert(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    none = CpuKernels("none", None, "")
    monkeypatch.setattr("paceline.decoder.weights.cpu_kernels", lambda: none)
    weights, biases = torch.randn(5, 24, 16), torch.randn(5, 24)
    experts = Experts(
        [Linear(w, b if bias else None) for w, b in zip(weights, biases, strict=True)]
    )
    chosen, x = torch.tensor([0, 0, 1, 3, 3, 3]), torch.randn(6, 16)
    expected = experts(x, chosen)
    experts.stack()
    torch.testing.assert_close(experts(x, chosen), expected)


def test_shares_over_all_experts_are_those_of_transformers(
    models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models["qwen3-moe"], tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["norm_topk_prob"] = False
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    found, expected = (
        logits(tmp_path / "model"),
        expected_logits(tmp_path / "model", random_tokens(40)),
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


EXPERT = "model.layers.1.mlp.experts.4.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), rf"lacks tensor '{EXPERT}'"),
        (
            lambda t: t.update({EXPERT: torch.zeros(64, 32)}),
            rf"'{EXPERT}' has shape \(64, 32\), expected \(64, 96\)",
        ),
        (
            lambda t: t.update({EXPERT.replace("4.up", "7.up"): torch.zeros(64, 96)}),
            "'model.layers.1.mlp.experts.7.up_proj.weight' is not part of a model",
        ),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), "lacks tensor '.*mlp.router.weight'"),
    ],
)
def test_missing_wrong_and_extra_experts_are_named(
    models: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model: .*{message}"):
        Decoder.load(changed(models["qwen3-moe"], tmp_path / "model", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok is 8 of 7 experts, expected 1 or more"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"mlp_only_layers": [0]}, r"layers without experts .* expected mlp_only_layers \[\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 1"),
    ],
)
def test_mixtures_that_are_not_supported(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(models["qwen3-moe"], tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModelError, match=message):
        Decoder.load(tmp_path / "model")
