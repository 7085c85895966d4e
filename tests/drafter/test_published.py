"""Published drafters of blocks: real configurations and headers, and trees of small ones.

Sources: z-lab/dflash ``tests/fixtures`` @0a7587c and @0698f53, ``dflash/model.py`` @1012959;
sgl-project/SpecForge ``configs/qwen3-8b-dspark.json`` @4e3f455 and
``qwen3-8b-dspark-draftvocab32k.json`` @134669b; vllm-project/speculators
``src/speculators/models/dflash/`` and ``dspark/`` @021e21b.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.convert.drafters import published_shape
from paceline.decoder import UnsupportedModelError
from paceline.drafter.growth.native import NativeGrowth
from paceline.drafter.methods.base import Budget
from paceline.drafter.methods.checkpoint import load_weights, read_shape
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.train.modules import DSparkModel

from .models import (
    SAMPLINGS,
    VOCAB,
    DenseDSpark,
    check_tree,
    load,
    random_weights,
    start,
    text_of,
    write_folder,
    write_model,
)

QWEN3_8B: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
    "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
SPECFORGE = QWEN3_8B | {
    "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7, "draft_vocab_size": 32000,
    "dflash_config": {
        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
        "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 256,
        "mask_token_id": 151669, "projector_type": "dspark", "target_layer_ids": [1, 9, 17, 25, 33],
    },
}  # fmt: skip
DFLASH = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 200000, "is_causal": False,
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0, "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404, "selector_rank": 256, "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
    "dtype": "bfloat16", "eos_token_id": 200001, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 6656, "initializer_range": 0.02, "intermediate_size": 19968,
    "layer_types": ["sliding_attention"] * 5, "max_position_embeddings": 131072,
    "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 52,
    "pad_token_id": 200018, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "sliding_window": 2048,
    "tie_word_embeddings": False, "transformers_version": "5.15.0", "use_cache": False,
    "use_sliding_window": True, "vocab_size": 202048,
}  # fmt: skip
DFLASH2_HEADER: dict[str, list[int]] = {
    "candidate_selector.hidden_projection.weight": [256, 6656],
    "candidate_selector.predecessor_codebook": [202048, 256],
    "candidate_selector.successor_codebook": [202048, 256],
    "fc.weight": [6656, 33280], "hidden_norm.weight": [6656], "norm.weight": [6656],
} | {
    f"layers.{index}.{name}": shape
    for index in range(5)
    for name, shape in {
        "attention_conv.base_kernel": [2, 2, 6656],
        "attention_conv.kernel_projection.weight": [1664, 6656],
        "input_layernorm.weight": [6656], "mlp.down_proj.weight": [6656, 19968],
        "mlp.gate_proj.weight": [19968, 6656], "mlp.up_proj.weight": [19968, 6656],
        "mlp_conv.base_kernel": [2, 2, 6656], "mlp_conv.kernel_projection.weight": [1664, 6656],
        "post_attention_layernorm.weight": [6656], "self_attn.k_norm.weight": [128],
        "self_attn.k_proj.weight": [1024, 6656], "self_attn.o_proj.weight": [6656, 4096],
        "self_attn.q_norm.weight": [128], "self_attn.q_proj.weight": [4096, 6656],
        "self_attn.v_proj.weight": [1024, 6656],
    }.items()
}  # fmt: skip
SELECTOR = {
    "markov_head.gate_proj.weight": "candidate_selector.hidden_projection.weight",
    "markov_head.markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_head.markov_w2.weight": "candidate_selector.successor_codebook",
}


def dspark_config(described: dict[str, Any]) -> DSparkConfig:
    return DSparkConfig.from_json(published_shape(described, "dspark", 8))


def shapes_of(config: DSparkConfig) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {name: list(t.shape) for name, t in DSparkModel(config).state_dict().items()}


def test_a_real_header_of_dflash_2_has_the_tensors_of_its_configuration() -> None:
    config = dspark_config(DFLASH2)
    found = {SELECTOR.get(name, name): shape for name, shape in shapes_of(config).items()}
    assert found == DFLASH2_HEADER
    assert (config.taps, config.block, config.levels) == ((1, 13, 25, 37, 49), 16, 15)
    assert config.attention == [(2047, False)] * 5
    assert (config.markov_best, config.logit_cap) == (16, 20.0)


def test_real_configurations_of_specforge_and_dflash() -> None:
    config = dspark_config(DFLASH)
    assert (config.from_anchor, config.levels, config.markov_rank) == (False, 15, 0)
    assert config.attention == [(0, False)] * 5
    assert shapes_of(config)["fc.weight"] == [4096, 5 * 4096]
    reduced = dspark_config(SPECFORGE)
    assert (reduced.from_anchor, reduced.levels, reduced.drafted) == (True, 7, 32000)
    shapes = shapes_of(reduced)
    assert shapes["markov_head.markov_w1.weight"] == [151936, 256]
    assert shapes["markov_head.markov_w2.weight"] == [32000, 256]
    assert shapes["confidence_head.proj.weight"] == [1, 4096 + 256]


SMALL = QWEN3_8B | {
    "head_dim": 16, "hidden_size": 32, "intermediate_size": 64,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 2048,
    "max_window_layers": 2, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "num_target_layers": 8, "vocab_size": VOCAB,
}  # fmt: skip
FLASH = SMALL | {
    "architectures": ["DFlashDraftModel"], "block_size": 5,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]},
}  # fmt: skip
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12,
    "use_sliding_window": True,
}  # fmt: skip
ALL_SLIDING = SLIDING | {"layer_types": ["sliding_attention"] * 2}
HEADS = {
    "markov_rank": 16, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
SPECULATORS = HEADS | {
    "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark",
    "speculators_version": "0.6.0", "block_size": 4, "mask_token_id": 3, "draft_vocab_size": 40,
    "aux_hidden_state_layer_ids": [1, 5], "sample_from_anchor": True, "target_hidden_size": None,
    "sliding_window_non_causal": False, "transformer_layer_config": SMALL | SLIDING,
}  # fmt: skip
SECOND = {
    **FLASH["dflash_config"], "conv_group_size": 8, "conv_kernel_size": 2, "selector_rank": 16,
    "selector_top_k": 9, "final_logit_softcapping": 20.0, "output_multiplier": 0.4, "block_size": 5,
}  # fmt: skip
FLASH2 = FLASH | ALL_SLIDING | {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": SECOND,
}  # fmt: skip
SPECULATORS_DFLASH = {k: v for k, v in SPECULATORS.items() if k not in HEADS} | {
    "speculators_model_type": "dflash", "sample_from_anchor": False, "projector_type": "dflash",
    "block_size": 5,
}  # fmt: skip
DEEPSPEC = SMALL | HEADS | {
    "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "target_layer_ids": [0, 4],
    "block_size": 4, "mask_token_id": 3,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSpec": DEEPSPEC,
    "speculators, DFlash": SPECULATORS_DFLASH,
    "DFlash": FLASH,
    "DFlash, sliding layers are causal": FLASH | SLIDING,
    "DFlash, causal": FLASH | {"is_causal": True},
    "DFlash, two-sided windows": FLASH | ALL_SLIDING | {"is_causal": False},
    "DFlash, factors": FLASH | {
        "dflash_config": FLASH["dflash_config"] | {"input_embedding_scale": 2.5}
    },
    "DFlash 2": FLASH2,
    "SpecForge, reduced": FLASH | {
        "architectures": ["DSparkDraftModel"], "block_size": 4, "draft_vocab_size": 40,
        "dflash_config": FLASH["dflash_config"] | HEADS | {"projector_type": "dspark"},
    },
    "speculators, reduced, causal windows": SPECULATORS,
    "speculators, two-sided windows": SPECULATORS | {
        "sliding_window_non_causal": True, "draft_vocab_size": VOCAB,
        "transformer_layer_config": SMALL | ALL_SLIDING,
    },
}  # fmt: skip


def publish(folder: Path, described: dict[str, Any]) -> Path:
    """A folder with random weights under the names of its project."""
    config = dspark_config(described)
    weights = random_weights(DSparkModel(config), 1)
    if config.draft_vocab_size:
        ids = weights["d2t"]
        chosen = torch.zeros(VOCAB, dtype=torch.bool)
        chosen[ids] = True
        weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": chosen}
    if config.markov_head == "product":
        weights = {SELECTOR.get(name, name): tensor for name, tensor in weights.items()}
    return write_folder(folder, described, weights)


@pytest.mark.parametrize("name", PUBLISHED)
def test_trees_equal_a_dense_beam_search(tmp_path: Path, name: str) -> None:
    """In one native call where there is one, and level by level."""
    target = write_model(tmp_path / "target", num_hidden_layers=8)
    folder = publish(tmp_path / "drafter", PUBLISHED[name])
    dense, depth = DenseDSpark(folder, target), 4
    drafter = load("dspark", folder, target, min_survival=0, max_nodes=64, widths="2,5")
    native = isinstance(drafter.growth.ways[0], NativeGrowth)
    assert native == (name != "DFlash 2")
    assert drafter.max_depth == dense.config.levels == depth
    for seed, (length, sampling) in enumerate(zip((2, 9, 17, 40, 90), SAMPLINGS, strict=True)):
        text = text_of(length, seed)
        states = dense.source(text, seed)
        tree = start(drafter, text, states, SAMPLINGS[sampling]).draft(Budget(64, 64))
        widths = [2, 5, 5, 5][:depth]
        check_tree(tree, dense.tree(text, states, SAMPLINGS[sampling], widths))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (FLASH, {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids"),
        (FLASH, {"block_size": None}, "block_size"),
        (FLASH, {"num_target_layers": None}, "num_target_layers"),
        (FLASH, {"dflash_config": SECOND | {"projector_type": "domino"}}, "domino"),
        (FLASH, {"dflash_config": SECOND | {"attention_mode": "mla"}}, "mla"),
        (FLASH, {"architectures": ["DSpineDraftModel"]}, "DSpine"),
        (FLASH, {"model_type": "llama"}, "llama"),
        (FLASH2, {"dflash_config": SECOND | {"conv_group_size": 7}}, "divide 32"),
        (SPECULATORS, {"sliding_window_non_causal": None}, "sliding_window_non_causal"),
        (SPECULATORS, {"speculators_model_type": "dflash2"}, "dflash2"),
        (SPECULATORS, {"speculators_model_type": "eagle3"}, "eagle3"),
        (SPECULATORS, {"sample_from_anchor": None}, "sample_from_anchor"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [1, 8]}, "last layer"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [0, 3]}, "embeddings"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [3, 1]}, "strictly"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": [1, 10]}, "strictly"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        (SPECULATORS, {"target_hidden_size": 99}, "target_hidden_size is 99"),
        (SPECULATORS, {"mask_token_id": None}, "mask_token_id"),
        (SPECULATORS, {"markov_head_type": "gated"}, "gated"),
        (SPECULATORS_DFLASH, {"projector_type": "domino"}, "domino"),
        (DEEPSPEC, {"architectures": ["Gemma4DSparkModel"]}, "Gemma4"),
        (DEEPSPEC, {"attention_bias": True}, "attention_bias"),
        (DEEPSPEC, {"target_layer_ids": [0, 7]}, "last layer"),
        (DEEPSPEC, {"target_layer_ids": [-1, 2]}, "embeddings"),
        (DEEPSPEC, {"num_target_layers": 6}, "6 layers"),
        (DEEPSPEC, {"markov_rank": None}, "markov_rank"),
    ],
)
def test_ambiguous_configurations_are_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    described = {key: value for key, value in (base | change).items() if value is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        read_shape(DSparkConfig, write_folder(tmp_path, described, {}), 8)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("markov_head.markov_w2.weight", None, "markov_w2"),
        ("fc.weight", (32, 96), "fc.weight"),
        ("markov_head.lag_gate_proj.weight", (3, 3), "lag_gate_proj"),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    weights = load_file(publish(tmp_path, DEEPSPEC) / "model.safetensors")
    weights.pop(name, None)
    if shape is not None:
        weights[name] = torch.zeros(shape)
    config, dtype = read_shape(DSparkConfig, write_folder(tmp_path, DEEPSPEC, weights))
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(tmp_path, config, dtype)


@pytest.mark.parametrize(
    "change",
    [
        {"windows": (3,)}, {"causal": (True,) * 3}, {"conv": (0, 8)}, {"block": 0},
        {"mask_token": VOCAB}, {"taps": ()}, {"kv_heads": 3}, {"block": 1, "from_anchor": False},
        {"markov_rank": 0}, {"confidence_temperatures": (1.0,)},
        {"confidence_temperatures": (1.0, 1.0, 1.0, 0.0)},
        {"confidence_temperatures": (1.0, 1.0, 1.0, float("nan"))},
        {"confidence_temperatures": (1.0,) * 4, "confidence": False, "confidence_markov": False},
    ],
)  # fmt: skip
def test_impossible_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        replace(dspark_config(DEEPSPEC), **change)
