"""Targets in transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
)

from paceline.convert import open_model
from paceline.train.blocks import plain_folder


def load_model(target: Path, dtype: torch.dtype) -> Any:
    """Load the transformers model of a GGUF file, or a folder whose weights may be in 8-bit blocks.

    Raises ``UnsupportedModelError``: a file's tensors are not the model's, as of experts.
    """
    if target.is_file():
        source = open_model(target)
        model = AutoModelForCausalLM.from_config(source.hf_config, dtype=dtype)
        tied = {"lm_head.weight"} if source.config().tied else set()
        names = model.state_dict().keys() - tied
        stored = {name: source.tensor(name, dtype, "cpu") for name in names}
        model.load_state_dict(stored, strict=not tied)
        return model
    with tempfile.TemporaryDirectory() as copy:
        plain = plain_folder(target, Path(copy))
        return AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
