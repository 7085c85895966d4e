"""Folders of EAGLE-3 drafters, in the layouts of EAGLE, SpecForge and speculators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.convert.drafters import HF_FIELDS, published_shape
from paceline.convert.weights import Checkpoint
from paceline.decoder import UnsupportedModelError
from paceline.drafter.methods.base import Budget, LoadError
from paceline.drafter.methods.checkpoint import load_weights, read_shape
from paceline.drafter.methods.eagle3 import Eagle3Config
from paceline.train.modules import Eagle3Model

from .models import (
    VOCAB,
    load,
    made_up_states,
    start,
    text_of,
    write_drafter,
    write_folder,
    write_model,
)
from .shapes import EAGLE3, randomised

D, FF, V, R = 24, 40, 50, 20

# The fields of config.json of SafeAILab/EAGLE and, with the second dictionary, of SpecForge.
EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": D, "initializer_range": 0.02, "intermediate_size": FF,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
    "use_cache": True, "vocab_size": V, "draft_vocab_size": R, "head_dim": 8,
}  # fmt: skip
SPECFORGE = EAGLE | {
    "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
    "max_window_layers": 48, "rope_scaling": None, "rope_theta": 1e4, "sliding_window": None,
    "use_sliding_window": False, "torch_dtype": "bfloat16", "transformers_version": "4.53.2",
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev42", "draft_vocab_size": R, "norm_before_residual": True,
    "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "transformer_layer_config": SPECFORGE,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
}  # fmt: skip
IDS = torch.arange(5, 45, 2)


def tensors(first: str, **more: tuple[int, ...]) -> dict[str, Tensor]:
    """Random weights by the names and shapes of the published checkpoints."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (R, D),
        f"{first}.hidden_norm.weight": (D,), f"{first}.input_layernorm.weight": (D,),
        f"{first}.post_attention_layernorm.weight": (D,),
        f"{first}.self_attn.q_proj.weight": (48, 2 * D),
        f"{first}.self_attn.k_proj.weight": (16, 2 * D),
        f"{first}.self_attn.v_proj.weight": (16, 2 * D),
        f"{first}.self_attn.o_proj.weight": (D, 48), f"{first}.mlp.gate_proj.weight": (FF, D),
        f"{first}.mlp.up_proj.weight": (FF, D), f"{first}.mlp.down_proj.weight": (D, FF), **more,
    }  # fmt: skip
    torch.manual_seed(3)
    made = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    chosen = torch.zeros(V, dtype=torch.bool)
    chosen[IDS] = True
    return {**made, "d2t": IDS - torch.arange(R), "t2d": chosen}


PUBLISHED = {
    "EAGLE": (EAGLE, tensors("midlayer"), {}),
    "SpecForge": (
        SPECFORGE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        tensors("midlayer", **{"embed_tokens.weight": (V, D)}), {},
    ),
    "3.1": (
        SPECFORGE | {"fc_norm": True, "norm_output": True},
        tensors("model.layers.0", **{f"model.fc_norm.{i}.weight": (D,) for i in range(3)}),
        {"fc_norm": True, "norm_output": True},
    ),
    "speculators": (
        SPECULATORS, tensors("layers.0", **{"embed_tokens.weight": (V, D)}),
        {"norm_before_residual": True},
    ),
    "speculators, gpt-oss": (
        SPECULATORS | {"norm_before_residual": False, "norm_before_fc": True},
        tensors("layers.0", **{"input_norm.weight": (3 * D,)}), {"norm_before_fc": True},
    ),
}  # fmt: skip


def test_a_target_of_another_width_is_refused(tmp_path: Path) -> None:
    """Even where embedding and head are the drafter's own."""
    whole = {"embed_tokens.weight": (V, D)}
    folder = write_folder(tmp_path / "raw", SPECFORGE, tensors("midlayer", **whole))
    target = write_model(tmp_path / "target", vocab_size=V, num_hidden_layers=8)
    with pytest.raises(LoadError, match="is for a target with hidden 24"):
        load("eagle3", folder, target)


def test_fields_that_are_left_out_are_those_of_the_target() -> None:
    """As in the drafter of Llama-3.1-8B, which names neither the size of heads nor layers."""
    described = {key: value for key, value in EAGLE.items() if key != "head_dim"}
    shape = published_shape(described, "eagle3", 32)
    assert (shape["head_dim"], shape["taps"]) == (D // 6, (1, 15, 28))


@pytest.mark.parametrize("layout", PUBLISHED)
def test_published_layouts_load(tmp_path: Path, layout: str) -> None:
    """Without numbers of layers they are the usual ones of a target with 8 layers."""
    described, weights, norms = PUBLISHED[layout]
    folder = write_folder(tmp_path, described, weights)
    config, dtype = read_shape(Eagle3Config, folder, 8)
    assert config == replace(EAGLE3, draft_vocab_size=R, **norms)
    assert dtype == torch.bfloat16
    loaded = load_weights(folder, config, dtype)
    assert torch.equal(loaded["d2t"], IDS)
    for name, tensor in weights.items():
        own = name.removeprefix("model.").replace("midlayer", "layers.0")
        if own not in ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(loaded[own], tensor)
    randomised(Eagle3Model(config)).load_state_dict(loaded)


def test_an_own_head_is_used(tmp_path: Path) -> None:
    """A raw folder drafts the trees of this project's, whose head is the target's rows."""
    target = write_model(tmp_path / "target")
    ours = write_drafter("eagle3", tmp_path / "ours", target, draft_vocab_size=40)
    stored, head = Checkpoint(ours, torch.float32), Checkpoint(target, torch.float32)
    ids = stored.stored("d2t")
    weights = {name.replace("layers.0", "midlayer"): stored[name] for name in stored}
    weights |= {"lm_head.weight": head["lm_head.weight"][ids], "d2t": ids - torch.arange(40)}
    shape = json.loads((ours / "config.json").read_text())["paceline"]["shape"]
    described = SPECFORGE | {key: shape[name] for name, key in HF_FIELDS.items()}
    described |= {"rope_parameters": shape["rope_parameters"], "draft_vocab_size": 40}
    described["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    raw = write_folder(tmp_path / "raw", described, weights)
    states = made_up_states(read_shape(Eagle3Config, ours)[0], 29)
    trees = []
    for folder in (ours, raw):
        drafter = load("eagle3", folder, target, widths="4,4", min_survival=0)
        assert drafter.fit.vocab_size == VOCAB
        trees.append(start(drafter, text_of(30), states).draft(Budget(8, 2)))
    assert trees[0] == trees[1]
    described["draft_vocab_size"] = 39
    with pytest.raises(LoadError, match="expected 39 rising token ids"):
        load("eagle3", write_folder(raw, described, weights), target)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (SPECFORGE, {"num_hidden_layers": 2}, "expected 1"),
        (SPECFORGE, {"model_type": "deepseek_v3"}, "deepseek_v3"),
        (SPECFORGE, {"attention_bias": True}, "attention_bias"),
        (SPECFORGE, {"hidden_act": "gelu"}, "gelu"),
        (SPECFORGE, {"fc_norm": True, "norm_before_fc": True}, "both true"),
        (SPECFORGE, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}}, "strictly"),
        (SPECFORGE, {"draft_vocab_size": 60}, "draft_vocab_size is 60"),
        (SPECFORGE, {"num_key_value_heads": 4}, "multiple"),
        (
            SPECFORGE,
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None},
            "no eagle3 drafter",
        ),
        (SPECULATORS, {"norm_before_residual": None}, "norm_before_residual"),
        (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [0, 4]}, "strictly"),
        (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [2, 9]}, "8 layers"),
        (SPECULATORS, {"speculators_model_type": "peagle"}, "peagle"),
        (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config"),
    ],
)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    described = {key: value for key, value in (base | change).items() if value is not None}
    write_folder(tmp_path, described, tensors("midlayer"))
    with pytest.raises(UnsupportedModelError, match=message):
        read_shape(Eagle3Config, tmp_path, 8)


def test_usual_layers_need_the_target(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="give it as the option target=PATH"):
        read_shape(Eagle3Config, write_folder(tmp_path, SPECFORGE, tensors("midlayer")))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("midlayer.self_attn.q_proj.weight", torch.zeros(48, D), r"q_proj.weight' of "),
        ("midlayer.self_attn.k_proj.bias", torch.zeros(16), "k_proj.bias"),
        ("midlayer.hidden_norm.weight", None, "hidden_norm"),
        ("fc.weight", torch.zeros(D, 2 * D), "fc.weight"),
        ("fc_norm.0.weight", torch.zeros(D), "fc_norm"),
        ("d2t", torch.zeros(R, dtype=torch.int64), "t2d"),
        ("d2t", torch.full((R,), 40), "below 50"),
        ("d2t", None, "no valid tensor 'd2t'"),
    ],
)
def test_other_tensors_are_refused(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    weights = tensors("midlayer")
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor if tensor.dtype == torch.int64 else tensor.bfloat16()
    folder = write_folder(tmp_path, SPECFORGE, weights)
    config, dtype = read_shape(Eagle3Config, folder, 8)
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(folder, config, dtype)
