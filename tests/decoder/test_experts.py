"""Routed experts: layouts of folders, blocks, bits of trees, and mixtures that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from decoder_cases import (
    PARENTS,
    ask_tree,
    changed,
    expected_logits,
    extend,
    logits,
    path_to,
    random_tokens,
    run,
)
from safetensors.torch import load_file
from torch import Tensor

from paceline.convert import load_decoder
from paceline.decoder import LocalCache, UnsupportedModelError

MIXTURES = ["qwen3-moe", "mixtral"]


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
        path = path_to(PARENTS, leaf)
        alone = run(decoder, torch.cat([prompt, tree[path]]), max_tokens=1)
        assert torch.equal(alone[len(prompt) :], found[path])


def test_shares_over_all_experts_are_those_of_transformers(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(models["qwen3-moe"], tmp_path / "model", norm_topk_prob=False)
    expected = expected_logits(folder, random_tokens(40))
    torch.testing.assert_close(logits(folder), expected, rtol=1e-3, atol=1e-3)


NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLE = torch.cat([NIBBLES, -NIBBLES])


def in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales as folders of gpt-oss have them, of weights ``[experts, ins, outs]``."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    scales = blocks.abs().amax(-1).clamp(min=1e-9).log2().floor().int() - 2 + 127
    scaled = blocks / (scales - 127).exp2()[..., None]
    nibbles = (scaled[..., None] - TABLE).abs().argmin(-1).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4, scales.to(torch.uint8)


def test_mxfp4_of_gpt_oss_keeps_its_values(models: dict[str, Path], tmp_path: Path) -> None:
    """Against the folder of the values in float32, which transformers reads."""
    values: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = in_mxfp4(tensors.pop(name))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            both = torch.stack([blocks & 15, blocks >> 4], -1).flatten(3).long()
            plain = TABLE[both] * (scales.float() - 127).exp2()[..., None]
            values[name] = plain.flatten(2).transpose(1, 2).contiguous()

    method = {"quant_method": "mxfp4"}
    folder = changed(models["gpt-oss"], tmp_path / "model", quantise, quantization_config=method)
    plain = changed(models["gpt-oss"], tmp_path / "plain", lambda tensors: tensors.update(values))
    expected = expected_logits(plain, random_tokens(40))
    for weights in ("float32", "auto", "int8"):
        decoder = load_decoder(folder, weights)
        assert decoder.config.weights == {"auto": "mxfp4"}.get(weights, weights)
        errors = (logits(decoder) - expected).std(-1) / expected.std(-1)
        assert errors.median() < (1e-4 if weights == "float32" else 0.08), weights

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255

    with pytest.raises(UnsupportedModelError, match=r"1\.mlp\.experts\.down_proj_scales' is dam"):
        load_decoder(changed(folder, tmp_path / "damaged", damage))
