"""Routed experts: layouts of folders, blocks, bits of trees, and mixtures that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoder_cases import ask_tree, changed, expected_logits, extend, path_to, random_tokens
from safetensors.torch import load_file
from torch import Tensor

from paceline.convert import load_decoder
from paceline.decoder import LocalCache, UnsupportedModelError

MIXTURES = ["qwen3-moe", "mixtral"]
PARENTS = (-1, 0, 0, 1, 2, 2, 3, 6, 7, 5)


def logits(folder: Path) -> Tensor:
    decoder = load_decoder(folder)
    return extend(decoder, LocalCache(decoder.config), random_tokens(40))


@pytest.mark.parametrize("name", MIXTURES)
def test_one_tensor_of_all_experts_loads_like_one_of_each(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(models[name])
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), logits(models[name]))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_tree_in_blocks_has_the_bits_of_decoding(models: dict[str, Path], weights: str) -> None:
    decoder = load_decoder(models["qwen3-moe"], weights)
    prompt, tree = random_tokens(37), random_tokens(len(PARENTS), 1)
    cache = LocalCache(decoder.config)
    extend(decoder, cache, prompt)
    found = ask_tree(decoder, cache, tree, PARENTS)
    for leaf in (4, 8, 9):
        path, alone = path_to(PARENTS, leaf), LocalCache(decoder.config)
        extend(decoder, alone, prompt)
        assert torch.equal(extend(decoder, alone, tree[path], max_tokens=1), found[path])


def test_shares_over_all_experts_are_those_of_transformers(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(models["qwen3-moe"], tmp_path / "model", norm_topk_prob=False)
    expected = expected_logits(folder, random_tokens(40))
    torch.testing.assert_close(logits(folder), expected, rtol=1e-3, atol=1e-3)


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
        load_decoder(changed(models["qwen3-moe"], tmp_path / "model", change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 8}, "model: num_experts_per_tok is 8 of 7 experts"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1]}, "no layer of the mixture of experts has"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "'model.layers.0.mlp.experts.*' is not part of"),
        ("glm4-moe", {"n_group": 5, "topk_group": 2}, "n_group is 5, topk_group 2: expected 1"),
        ("ernie-moe", {"use_bias": True}, "use_bias is true, expected false in a mixture"),
        ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias is false, expected experts chos"),
        ("lfm2", {"conv_bias": True}, "conv_bias is true, expected short convolutions without"),
        ("lfm2", {"conv_L_cache": 9}, "conv_L_cache is 9, expected 2 to 8"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types are all conv, expected some full"),
        (
            "gemma4",
            {"hidden_size_per_layer_input": 8},
            "per_layer_input is 8, expected no embedding",
        ),
        ("gemma4", {"num_kv_shared_layers": 1}, "shared_layers is 1, expected no keys and values"),
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block is True, expected a feed-forward"),
        ("gemma4", {"head_dim": 48}, "of widths .32, 48., expected a number and a multiple of it"),
        ("gpt-oss", {"quantization_config": {"quant_method": "gptq"}}, "by 'gptq' are not"),
        ("gpt-oss", {"swiglu_alpha": 2.0}, "swiglu_alpha is 2.0, expected 1.702"),
    ],
)
def test_layers_that_are_not_supported(
    models: dict[str, Path], tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_decoder(changed(models[name], tmp_path / "model", **change))


NIBBLES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales as folders of gpt-oss have them, of weights ``[experts, ins, outs]``."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    scales = blocks.abs().amax(-1).clamp(min=1e-9).log2().floor().int() - 2 + 127
    table = torch.tensor([*NIBBLES, *(-each for each in NIBBLES)])
    scaled = blocks / (scales - 127).exp2()[..., None]
    nibbles = (scaled[..., None] - table).abs().argmin(-1).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4, scales.to(torch.uint8)


def test_mxfp4_of_gpt_oss_keeps_its_values(models: dict[str, Path], tmp_path: Path) -> None:
    """Against the folder of the values in float32, which transformers reads."""
    values: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = in_mxfp4(tensors.pop(name))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            both = torch.stack([blocks & 15, blocks >> 4], -1).flatten(3).long()
            table = torch.tensor([*NIBBLES, *(-each for each in NIBBLES)])
            plain = table[both] * (scales.float() - 127).exp2()[..., None]
            values[name] = plain.flatten(2).transpose(1, 2).contiguous()

    method = {"quant_method": "mxfp4"}
    folder = changed(models["gpt-oss"], tmp_path / "model", quantise, quantization_config=method)
    plain = changed(models["gpt-oss"], tmp_path / "plain", lambda tensors: tensors.update(values))
    tokens = random_tokens(40)
    expected = expected_logits(plain, tokens)
    for weights in ("float32", "auto", "int8"):
        decoder = load_decoder(folder, weights)
        assert decoder.config.weights == {"auto": "mxfp4"}.get(weights, weights)
        found = extend(decoder, LocalCache(decoder.config), tokens)
        errors = (found - expected).std(-1) / expected.std(-1)
        assert errors.median() < (1e-4 if weights == "float32" else 0.08), weights
    assert logits(folder).shape == expected.shape

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255

    with pytest.raises(UnsupportedModelError, match=r"1\.mlp\.experts\.down_proj_scales' is dam"):
        load_decoder(changed(folder, tmp_path / "damaged", damage))
