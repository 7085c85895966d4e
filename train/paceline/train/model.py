"""Language models in transformers: making, reading, writing and measuring them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from paceline.convert import open_model
from paceline.train.blocks import plain_folder, store_blocks
from paceline.train.presets import Preset
from paceline.train.run import Progress, cleared

STDLIB_HEADER = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: paceline
pipeline_tag: text-generation
---
"""
STDLIB_LICENCE = (
    "The training text is source code of Python, © Python Software Foundation, under the PSF "
    "licence (https://docs.python.org/3/license.html). The model can recite parts of it; treat "
    "what it writes as derived from that source."
)
LICENCES = {
    True: STDLIB_LICENCE,
    False: "The licence is that of the training text: look it up before passing the model on.",
}  # licence of a model, by whether it was trained on the standard library


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


def load_model(target: Path, dtype: torch.dtype) -> Any:
    """The transformers model of a GGUF file, or of a folder whose weights may be in 8-bit blocks.

    Raises ``UnsupportedModelError``: a file's tensors are not those of the model, as of experts.
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


def save_model(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Write an HF model folder (8-bit blocks, config, tokenizer); `model` becomes bf16.

    Files of an older model in `folder` are removed. Returns the model as read back from there, for
    measurements.
    """
    cleared(folder).mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    store_blocks(folder)
    shipped: LlamaForCausalLM = load_model(folder, torch.bfloat16).to(model.device)
    return shipped


def shape_text(p: Preset, model: nn.Module) -> str:
    """Shape of a language model, for its card."""
    parameters = sum(each.numel() for each in model.parameters())
    return (
        f"- {parameters / 1e6:.1f} M parameters, in 8-bit blocks: width {p.width}, "
        f"{p.layers} layers, {p.heads} heads over {p.kv_heads} KV heads of {p.head_width}, "
        f"feed-forward {p.ff}, tied embedding\n"
        f"- context {p.context} tokens, rope theta {p.rope_theta:g}\n"
        f"- byte-level BPE of {p.vocabulary} tokens; `<|endoftext|>` opens and ends a text\n"
    )


def schedule_text(p: Preset, progress: Progress) -> str:
    """Schedule and budgets of a language model's run, for its card."""
    stages = ", then ".join(
        f"{stage.rows} × {stage.length} tokens for {stage.share:.0%} of the time"
        + (f" from the first {p.focus_files} files alone" if stage.focus else "")
        for stage in p.stages
    )
    return f"{progress.description}.\nSteps: {stages}.\n"
