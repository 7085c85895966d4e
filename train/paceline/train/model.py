"""Language models in transformers: a new one of a preset's shape, and that of a folder."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.decoder import plain_folder
from paceline.train.preset import Preset


def build_model(preset: Preset, eos: int, seed: int = 0) -> LlamaForCausalLM:
    """A freshly initialised fp32 model of the preset's shape; `eos` is its bos and eos token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=preset.vocabulary,
        hidden_size=preset.width,
        intermediate_size=preset.ff,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_width,
        max_position_embeddings=preset.context,
        rope_parameters={"rope_type": "default", "rope_theta": preset.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
    )
    return LlamaForCausalLM(config)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a Hugging Face folder, whose weights may be in 8-bit blocks."""
    with tempfile.TemporaryDirectory() as copy:
        plain = plain_folder(folder, Path(copy))
        return AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
