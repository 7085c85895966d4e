"""Random tiny models, and a dense reference for what a drafter makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Sharper than the usual initialisation, so that choices differ clearly.
    "initializer_range": 0.3,
}


def write_model(folder: Path, family: str = "llama", seed: int = 0, **shape: Any) -> Path:
    """Save a random model in fp32, with a tokenizer; the same arguments give the same weights."""
    torch.manual_seed(seed)
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    if family == "qwen3":
        shape = {"head_dim": 8, **shape}
    model(config(**{**_SHAPE, **shape})).save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


def change_config(folder: Path, **fields: Any) -> None:
    """Rewrite fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
