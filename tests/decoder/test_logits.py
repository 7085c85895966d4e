"""Logits against transformers, for every family and feature."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_cases import (
    FAMILIES,
    PARENTS,
    VOCAB,
    ask_tree,
    changed,
    expected_logits,
    extend,
    logits,
    path_to,
    random_tokens,
    run,
    save_model,
)
from gguf_files import write_gguf
from torch import Tensor

from paceline.convert import load_decoder
from paceline.decoder import LocalCache, UnsupportedModelError
from paceline.kernels import QueryBlock, plan_trees

MORE = "model.layers.3.self_attn.v_norm.weight"


def assert_agrees(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    difference = (found.float() - expected).abs().max() / expected.abs().max()
    assert difference < tolerance


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_decode_and_trees_agree_with_transformers(
    models: dict[str, Path], name: str
) -> None:
    decoder = load_decoder(models[name])
    cache = LocalCache(decoder.config)
    tokens, tree = random_tokens(380), random_tokens(len(PARENTS), seed=1)
    expected = expected_logits(models[name], tokens)
    assert_agrees(extend(decoder, cache, tokens[:370]), expected[:370])
    assert_agrees(extend(decoder, cache, tokens[370:], max_tokens=1), expected[370:])
    found = ask_tree(decoder, cache, tree, PARENTS)
    for leaf in (4, 8, 9):
        path = path_to(PARENTS, leaf)
        expected = expected_logits(models[name], torch.cat([tokens, tree[path]]))
        assert_agrees(found[path], expected[380:])


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen2"])
def test_bfloat16_is_as_close_as_transformers_bfloat16(models: dict[str, Path], name: str) -> None:
    import transformers

    tokens = random_tokens(120)
    exact = expected_logits(models[name], tokens)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.bfloat16)
    with torch.no_grad():
        rounded = theirs.eval()(tokens[None]).logits[0].float()
    found = logits(models[name], "bfloat16", 120).float()
    assert (found - exact).abs().mean() <= 1.1 * (rounded - exact).abs().mean()


def test_longrope_of_short_contexts_is_that_of_transformers(models: dict[str, Path]) -> None:
    tokens = random_tokens(64)  # the original context
    decoder = load_decoder(models["phi3"], max_context=64)
    assert_agrees(run(decoder, tokens), expected_logits(models["phi3"], tokens))
    longer = load_decoder(models["phi3"], max_context=65)
    assert longer.config == load_decoder(models["phi3"]).config


def test_sharded_weights_load_like_single_ones(models: dict[str, Path], tmp_path: Path) -> None:
    save_model(tmp_path, "llama", max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(models["llama"]), logits(tmp_path))


_VISION = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}


@pytest.mark.parametrize(
    ("name", "family", "vision", "more"),
    [
        (
            "gemma3", "Gemma3",
            {"image_size": 28, "num_hidden_layers": 1, "num_attention_heads": 2},
            {"mm_tokens_per_image": 4},
        ),
        ("qwen3-5", "Qwen3_5", {"out_hidden_size": 96, "depth": 1, "num_heads": 2}, {}),
    ],
)  # fmt: skip
def test_the_text_part_of_a_model_for_texts_and_images(
    models: dict[str, Path], tmp_path: Path, name: str, family: str, vision: dict[str, int],
    more: dict[str, int],
) -> None:  # fmt: skip
    import transformers

    text = transformers.AutoModelForCausalLM.from_pretrained(models[name])
    described = {"text_config": text.config.to_dict(), "vision_config": {**_VISION, **vision}}
    config = getattr(transformers, f"{family}Config")(**described, **more)
    both = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    both.save_pretrained(tmp_path)
    assert torch.equal(logits(tmp_path), logits(models[name]))


def test_logits_only_of_requested_rows_and_taps_of_requested_layers(
    models: dict[str, Path],
) -> None:
    import transformers

    decoder = load_decoder(models["llama"])
    cache = LocalCache(decoder.config)
    tokens = random_tokens(30)
    plan = plan_trees([QueryBlock(0, 0, None, 30)])
    full = decoder.forward(tokens, plan, [cache], logit_rows=None)
    some = decoder.forward(tokens, plan, [cache], logit_rows=torch.tensor([29, 3]), taps=(1, 0))
    assert full.taps == ()
    assert some.logits.shape == (2, VOCAB)
    assert torch.equal(some.logits, full.logits[[29, 3]])
    model = transformers.AutoModelForCausalLM.from_pretrained(models["llama"])
    with torch.no_grad():  # their last hidden state is after the norm: look at the layers
        outputs: list[Tensor] = []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _m, _i, out: outputs.append(out))
        model(tokens[None])
    for tap, output in zip(some.taps, reversed(outputs), strict=True):
        assert_agrees(tap, output[0])


def test_tensors_that_published_models_have_and_nothing_reads(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Layers with the keys and values of another one have projections of their own."""

    def add(tensors: dict[str, Tensor]) -> None:
        for name in ("k_proj", "v_proj", "k_norm"):
            stored = tensors[f"model.layers.0.self_attn.{name}.weight"]
            tensors[f"model.layers.3.self_attn.{name}.weight"] = stored.clone()

    folder = changed(models["gemma4-small"], tmp_path / "model", add)
    expected = logits(models["gemma4-small"])
    assert torch.equal(logits(folder), expected)
    assert torch.equal(logits(write_gguf(tmp_path / "model.gguf", folder)), expected)
    folder = changed(folder, tmp_path / "other", lambda t: t.update({MORE: torch.zeros(96)}))
    with pytest.raises(UnsupportedModelError, match=f"{MORE}' is not part of"):
        load_decoder(folder)


def test_an_epsilon_of_other_families_is_not_read(models: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(models["lfm2"], tmp_path / "model", rms_norm_eps=0.5)
    assert torch.equal(logits(folder), logits(models["lfm2"]))


def test_mimo_is_qwen2_with_a_type_of_its_own(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers has no class for it; its heads for multi-token prediction are left out."""
    head = {"model.mtp_layers.0.input_proj.weight": torch.zeros(96, 192)}
    folder = changed(
        models["qwen2"], tmp_path / "mimo", lambda tensors: tensors.update(head),
        model_type="mimo", architectures=["MiMoForCausalLM"],
        auto_map={"AutoConfig": "own.Config"}, num_nextn_predict_layers=1,
    )  # fmt: skip
    decoder, tokens = load_decoder(folder), random_tokens(50)
    assert decoder.config.model_type == "mimo"
    assert_agrees(run(decoder, tokens), expected_logits(models["qwen2"], tokens))
