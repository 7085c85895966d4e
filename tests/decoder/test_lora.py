"""LoRA adapters: merged weights by PEFT's rules, fingerprints, drafters, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cases import changed, logits
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.convert import load_decoder, open_model
from paceline.convert.weights import plain
from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.base import Resources
from paceline.drafter.methods.selfspec import SelfSpecDrafter

CONFIG = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
}  # fmt: skip
Pairs = dict[str, tuple[Tensor, Tensor]]  # A and B of each module
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def adapter(folder: Path, base: Path, modules: dict[str, int], **config: Any) -> Pairs:
    """Write a PEFT folder that changes modules, given their ranks; returns its A and B."""
    folder.mkdir()
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(3)
    pairs = {}
    for module, rank in modules.items():
        outs, ins = weights[f"{module}.weight"].shape
        pairs[module] = torch.randn(rank, ins) / 4, torch.randn(outs, rank) / 4
    tensors = {
        f"base_model.model.{module}.lora_{name}.weight": tensor
        for module, pair in pairs.items()
        for name, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return pairs


def merged(base: Path, to: Path, pairs: Pairs, scales: dict[str, float]) -> Path:
    """A folder of the model with an adapter's changes."""

    def change(weights: dict[str, Tensor]) -> None:
        for module, (a, b) in pairs.items():
            weights[f"{module}.weight"] += scales[module] * b @ a

    return changed(base, to, change)


@pytest.mark.parametrize(
    ("config", "ranks", "scales"),
    [
        ({}, (4, 4), (1.5, 1.5)),
        ({"use_rslora": True}, (4, 4), (3.0, 3.0)),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.down_proj": 8}},
         (2, 4), (3.0, 2.0)),
    ],
)  # fmt: skip
def test_an_adapter_is_merged(
    models: dict[str, Path], tmp_path: Path, config: dict[str, Any], ranks: tuple[int, int],
    scales: tuple[float, float],
) -> None:  # fmt: skip
    base = models["llama"]
    pairs = adapter(tmp_path / "lora", base, dict(zip((Q, DOWN), ranks, strict=True)), **config)
    folder = merged(base, tmp_path / "merged", pairs, dict(zip((Q, DOWN), scales, strict=True)))
    source = open_model(base, tmp_path / "lora")
    torch.testing.assert_close(logits(source), logits(open_model(folder)), rtol=1e-3, atol=1e-3)
    assert len({each.fingerprint() for each in (source, open_model(base), open_model(folder))}) == 3


def test_adapters_of_experts_of_gguf_files_and_of_blocks(
    models: dict[str, Path], tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w1"
    pairs = adapter(tmp_path / "lora", models["mixtral"], {name: 4, Q: 4})
    folder = merged(models["mixtral"], tmp_path / "merged", pairs, {name: 1.5, Q: 1.5})
    for weights in ("float32", "int8"):
        source = open_model(models["mixtral"], tmp_path / "lora")
        found, expected = logits(source, weights), logits(open_model(folder), weights)
        assert (found - expected).std() < 0.02 * expected.std()
    file = write_gguf(tmp_path / "model.gguf", models["mixtral"], Kind.Q8_0)
    source = open_model(file, tmp_path / "lora")
    changed = dict(source.weights(source.config()))
    plainly = dict(open_model(file).weights(source.config()))
    for tensor, weight in changed.items():
        difference = plain(weight, torch.float32) - plain(plainly[tensor], torch.float32)
        ours = {f"{Q}.weight": Q, "model.layers.1.mlp.experts.2.gate_proj.weight": name}
        if tensor not in ours:
            assert not difference.any()
            continue
        a, b = pairs[ours[tensor]]
        torch.testing.assert_close(difference, 1.5 * b @ a, rtol=0.05, atol=0.02)


def test_selfspec_drafts_with_the_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    adapter(tmp_path / "lora", models["llama"], {Q: 4})
    options = {"lora": str(tmp_path / "lora")}
    drafter = SelfSpecDrafter.load(models["llama"], options, Resources())
    source = open_model(models["llama"], tmp_path / "lora")
    assert drafter.fit.target_fingerprint == source.fingerprint()
    assert torch.equal(logits(drafter.decoder), logits(source))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora True is not supported; merge it with PEFT, PeftModel"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not"),
        ({"r": 0}, "r is 0, expected a number above 0"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern or alpha_pattern is invalid: "),
        ({"rank_pattern": {"(a|a)*q": 4}}, "rank_pattern has .* which may take for ever"),
        ({"alpha_pattern": {".*" * 9: 4}}, "alpha_pattern has .* which may take for ever"),
        ({"rank_pattern": [4]}, r"rank_pattern is \[4\], expected an object"),
        ({"r": float("inf")}, "r is inf, expected a number above 0"),
        ({"lora_alpha": True}, "lora_alpha is True, expected a number above 0"),
        ({"alpha_pattern": {"q_proj": "x"}}, "rank_pattern or alpha_pattern is invalid: "),
        ({"r": 8}, r"lora_A.weight' has shape \(4, 96\) .* expected rank 8 for 'model.layers.1.se"),
    ],
)
def test_adapters_that_are_not_implemented_are_refused(
    models: dict[str, Path], tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    adapter(tmp_path / "lora", models["llama"], {Q: 4}, **config)
    with pytest.raises(UnsupportedModelError, match=f"adapter {tmp_path}/lora: .*{message}"):
        load_decoder(open_model(models["llama"], tmp_path / "lora"))


def test_tensors_that_do_not_fit_the_model_are_named(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no adapter_config\.json"):
        open_model(models["llama"], tmp_path)
    adapter(tmp_path / "lora", models["llama"], {"model.layers.0.mlp.gate_proj": 4})
    source = open_model(models["phi3"], tmp_path / "lora")
    with pytest.raises(UnsupportedModelError, match=r"it changes 'model\.layers\.0\.mlp\.gate_pr"):
        load_decoder(source)
    file = tmp_path / "lora/adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_B.weight"
    for changes, message in (
        (
            {name.replace("B.weight", "magnitude_vector"): torch.zeros(3)},
            "magnitude_vector', DoRA, is not supported; merge it with PEFT",
        ),
        ({name.replace("layers.0", "layers.1"): torch.zeros(3, 4)}, "one is missing"),
    ):
        save_file(tensors | changes, file)
        with pytest.raises(UnsupportedModelError, match=message):
            open_model(models["llama"], tmp_path / "lora")


HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


def with_tensors(folder: Path, **tensors: Tensor) -> None:
    """Add tensors to an adapter; `__` stands for a dot in their names."""
    file = folder / "adapter_model.safetensors"
    named = {
        f"base_model.model.{name.replace('__', '.')}": each.contiguous()
        for name, each in tensors.items()
    }
    save_file(load_file(file) | named, file)


@pytest.mark.parametrize("name", ["lm_head__base_layer__weight", "lm_head__weight"])
def test_the_adapter_s_own_head_and_embedding_replace_the_model_s(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """PEFT stores the matrix below a change of the LM head or of the embedding."""
    base = models["llama"]
    pairs = adapter(tmp_path / "lora", base, {HEAD: 4, Q: 4})
    weights = load_file(base / "model.safetensors")
    head, embedding = weights[f"{HEAD}.weight"] * 2, weights[f"{EMBEDDING}.weight"] * 3
    with_tensors(tmp_path / "lora", **{name: head, "model__embed_tokens__weight": embedding})
    expected = {
        f"{HEAD}.weight": head + 1.5 * pairs[HEAD][1] @ pairs[HEAD][0],
        f"{EMBEDDING}.weight": embedding,
        f"{Q}.weight": weights[f"{Q}.weight"] + 1.5 * pairs[Q][1] @ pairs[Q][0],
    }
    source = open_model(base, tmp_path / "lora")
    for key, found in source.weights(source.config("float32")).items():
        torch.testing.assert_close(found, expected.get(key, weights[key]))
    with_tensors(tmp_path / "lora", **{name: torch.cat([head, head[:2]])})
    source = open_model(base, tmp_path / "lora")
    with pytest.raises(UnsupportedModelError, match="if tokens were added, merge it with PEFT"):
        load_decoder(source)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model__embed_tokens__lora_embedding_A", "LoRA on the embedding"),
        ("model__layers__0__mlp__down_proj__lora_magnitude_vector", "DoRA"),
        ("model__layers__0__mlp__down_proj__bias", "a bias"),
        ("model__layers__0__mlp__down_proj__base_layer__bias", "a bias"),
        ("model__layers__0__mlp__down_proj__lora_B__bias", "a bias"),
        ("model__embed_tokens__token_adapter__trainable_tokens_delta", "trained tokens"),
        ("score__modules_to_save__weight", "a module that was trained as a whole"),
        ("model__layers__0__input_layernorm__weight", "a module that was trained as a whole"),
        ("model__prompt", "nothing known"),
    ],
)
def test_other_tensors_of_peft_are_refused_with_a_way_out(
    models: dict[str, Path], tmp_path: Path, name: str, what: str
) -> None:
    adapter(tmp_path / "lora", models["llama"], {Q: 4})
    with_tensors(tmp_path / "lora", **{name: torch.zeros(4, 4)})
    with pytest.raises(UnsupportedModelError) as caught:
        open_model(models["llama"], tmp_path / "lora")
    assert f"tensor 'base_model.model.{name.replace('__', '.')}', {what}, is" in str(caught.value)
    assert "merge_and_unload().save_pretrained(DIR)" in str(caught.value)
