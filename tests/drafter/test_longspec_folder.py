"""Folders of LongSpec drafters, and shapes taken from targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3Config

from paceline.decoder import UnsupportedModelError, load_config
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    read_longspec,
    save_longspec,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
_ORIGINAL = {"rope_theta": 1e5, "original_max_position_embeddings": 128}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        **_ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, **_ORIGINAL},
}  # fmt: skip
REF = TargetRef("some-target", ("LlamaForCausalLM",), "f" * 64, "a" * 64)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embedding_equals_the_target_s(tmp_path: Path, kind: Any, rope: str) -> None:
    """Also after saving and loading, because the target's keys are read unchanged."""
    kind(**_SHAPE, head_dim=16, rope_parameters=ROPES[rope]).save_pretrained(tmp_path / "target")
    target = load_config(tmp_path / "target")
    config = LongSpecConfig.for_target(tmp_path / "target", window=7, final_norm=False)
    save_longspec(tmp_path / "drafter", config, LongSpecModel(config).state_dict(), REF)
    for found in (config, read_longspec(tmp_path / "drafter")[0]):
        assert found.rope_inv_freq == target.rope_inv_freq
        assert found.rope_scaling == target.rope_scaling
        assert (found.hidden, found.head_dim, found.norm_eps) == (32, 16, target.norm_eps)
        assert (found.window, found.final_norm) == (7, False)
        assert (found.target_layer, found.target_layers) == (3, 4)


def test_a_folder_holds_no_frozen_weights(tmp_path: Path) -> None:
    LlamaConfig(**_SHAPE).save_pretrained(tmp_path / "target")
    config = LongSpecConfig.for_target(tmp_path / "target", layer=1)
    model = LongSpecModel(config)
    save_longspec(tmp_path / "drafter", config, model.state_dict(), REF, notes={"steps": 3})
    assert read_longspec(tmp_path / "drafter") == (config, torch.bfloat16)
    saved = load_file(tmp_path / "drafter" / "model.safetensors")
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    said = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert said["speculators_config"]["algorithm"] == "longspec"
    assert said["speculators_config"]["verifier"]["name_or_path"] == "some-target"
    assert said["paceline"]["target_fingerprint"] == REF.fingerprint
    assert said["paceline"]["training"] == {"steps": 3}


@pytest.mark.parametrize("layer", [4, -5])
def test_a_layer_that_the_target_lacks_is_refused(tmp_path: Path, layer: int) -> None:
    LlamaConfig(**_SHAPE).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="0 to 3"):
        LongSpecConfig.for_target(tmp_path, layer=layer)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    LlamaConfig(**_SHAPE).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no 'paceline' section"):
        read_longspec(tmp_path)
