"""Folders of DSpark and DFlash drafters, in the layouts of DeepSpec and speculators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.checkpoint import load_weights, read_shape
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.train.modules import DSparkModel

from .models import write_folder
from .shapes import DSPARK, randomised

D, FF, V, R, LAYERS = 24, 40, 50, 6, 2

# As the two projects write it: a Qwen3 configuration, and their own fields.
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": LAYERS,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": V,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "tie_word_embeddings": False,
}  # fmt: skip
HEADS: dict[str, Any] = {
    "block_size": 4, "mask_token_id": 7, "markov_rank": R, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
DEEPSPEC = QWEN3 | HEADS | {
    "architectures": ["Qwen3DSparkModel"], "num_target_layers": 4, "num_anchors": 512,
    "target_layer_ids": [0, 2], "dtype": "bfloat16",
}  # fmt: skip
SPECULATORS = HEADS | {
    "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark",
    "speculators_version": "0.6.0", "draft_vocab_size": V, "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [1, 3], "sample_from_anchor": True,
    "sliding_window_non_causal": False, "transformer_layer_config": QWEN3,
    "speculators_config": {
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
    },
}  # fmt: skip
DFLASH = {
    key: value for key, value in SPECULATORS.items() if not key.startswith(("markov", "confi"))
} | {"speculators_model_type": "dflash", "sample_from_anchor": False, "projector_type": "dflash"}
DFLASH.pop("enable_confidence_head")
NO_HEADS: dict[str, Any] = {
    "markov_rank": 0, "confidence": False, "confidence_markov": False
}  # fmt: skip


def tensors(markov: str | None, *, confidence: bool = True, frozen: bool = False) -> Any:
    """Random weights by the names and shapes of the published checkpoints."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,),
    }  # fmt: skip
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (D,), "post_attention_layernorm": (D,),
                "self_attn.q_proj": (48, D), "self_attn.k_proj": (16, D),
                "self_attn.v_proj": (16, D), "self_attn.o_proj": (D, 48),
                "self_attn.q_norm": (8,), "self_attn.k_norm": (8,),
                "mlp.gate_proj": (FF, D), "mlp.up_proj": (FF, D), "mlp.down_proj": (D, FF),
            }.items()
        }  # fmt: skip
    if frozen:
        shapes |= {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    if markov:
        shapes |= {"markov_head.markov_w1.weight": (V, R), "markov_head.markov_w2.weight": (V, R)}
    if confidence:
        wide = D + (R if markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, wide), "confidence_head.proj.bias": (1,)}
    torch.manual_seed(3)
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_published_layouts_load(tmp_path: Path, layout: str) -> None:
    deepspec = layout == "deepspec"
    described = DEEPSPEC if deepspec else SPECULATORS
    weights = tensors("vanilla", frozen=deepspec)
    folder = write_folder(tmp_path, described, weights)
    config, dtype = read_shape(DSparkConfig, folder, 4)
    assert config == DSPARK
    assert dtype == torch.bfloat16
    loaded = load_weights(folder, config, dtype)
    assert set(weights) - set(loaded) <= {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(loaded[name], weights[name]) for name in loaded)
    randomised(DSparkModel(config)).load_state_dict(loaded)


def test_dflash_loads(tmp_path: Path) -> None:
    """From speculators as a type of its own, from DeepSpec as a DSpark without heads."""
    plain = replace(DSPARK, **NO_HEADS)
    weights = tensors(None, confidence=False)
    config, _ = read_shape(DSparkConfig, write_folder(tmp_path / "a", DFLASH, weights), 4)
    assert config == replace(plain, from_anchor=False)
    assert config.levels == 3
    load_weights(tmp_path / "a", config, torch.bfloat16)
    described = {k: v for k, v in DEEPSPEC.items() if k not in (
        "markov_head_type", "confidence_head_with_markov")}  # fmt: skip
    described |= {"markov_rank": 0, "enable_confidence_head": False}
    config, _ = read_shape(DSparkConfig, write_folder(tmp_path / "b", described, weights))
    assert config == plain


TEMPERATURES = {"confidence_temperatures": (0.5, 1.0, 2.0, 1.25)}


@pytest.mark.parametrize("wrong", [(1.0, 1.0), (1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1.0, float("nan"))])
def test_temperatures_that_no_head_has_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match="confidence_temperatures is"):
        replace(DSPARK, confidence_temperatures=wrong)
    with pytest.raises(UnsupportedModelError, match="with a confidence head"):
        replace(DSPARK, **NO_HEADS, **TEMPERATURES)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (SPECULATORS, {"sample_from_anchor": None}, "sample_from_anchor"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [1, 4]}, "last layer"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [0, 3]}, "embeddings"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [3, 1]}, "strictly"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [1, 9]}, "strictly"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        (SPECULATORS, {"target_hidden_size": 99}, "target_hidden_size is 99"),
        (SPECULATORS, {"mask_token_id": None}, "mask_token_id"),
        (SPECULATORS, {"markov_head_type": "gated"}, "gated"),
        (DFLASH, {"projector_type": "domino"}, "domino"),
        (SPECULATORS, {"speculators_model_type": "eagle3"}, "eagle3"),
        (DEEPSPEC, {"architectures": ["Gemma4DSparkModel"]}, "Gemma4"),
        (DEEPSPEC, {"model_type": "llama"}, "llama"),
        (DEEPSPEC, {"attention_bias": True}, "attention_bias"),
        (DEEPSPEC, {"target_layer_ids": [0, 3]}, "last layer"),
        (DEEPSPEC, {"target_layer_ids": [-1, 2]}, "embeddings"),
        (DEEPSPEC, {"num_target_layers": 6}, "6 layers"),
        (DEEPSPEC, {"block_size": None}, "block_size"),
        (DEEPSPEC, {"markov_rank": None}, "markov_rank"),
    ],
)
def test_ambiguous_configurations_are_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    described = {key: value for key, value in (base | change).items() if value is not None}
    write_folder(tmp_path, described, tensors("vanilla"))
    with pytest.raises(UnsupportedModelError, match=message):
        read_shape(DSparkConfig, tmp_path, 4)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("markov_head.markov_w2.weight", None, "markov_w2"),
        ("fc.weight", (D, 3 * D), "fc.weight"),
        ("markov_head.lag_gate_proj.weight", (3, 3), "lag_gate_proj"),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    weights = tensors("vanilla")
    weights.pop(name, None)
    if shape is not None:
        weights[name] = torch.zeros(shape).bfloat16()
    folder = write_folder(tmp_path, SPECULATORS, weights)
    config, dtype = read_shape(DSparkConfig, folder)
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(folder, config, dtype)


def test_impossible_shapes_are_refused() -> None:
    for change in ({"block": 0}, {"mask_token": 50}, {"taps": ()}, {"kv_heads": 4},
                   {"block": 1, "from_anchor": False}, {"markov_rank": 0}):  # fmt: skip
        with pytest.raises(UnsupportedModelError):
            replace(DSPARK, **change)
    assert isinstance(DSPARK, DSparkConfig)
