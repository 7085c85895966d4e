"""Tiny models, prompts and reference outputs for tests with real processes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from paceline.client import DraftOptions

VOCABULARY = 320
THREADS = {"OMP_NUM_THREADS": "1"}
EAGER = DraftOptions(timeout=60, first_delay=0.05, longest_delay=0.1, adaptive=False)
"""Drafts in every round, for tests that are of drafting, however slow the machine makes it."""
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Wider than usual, so that the next token depends on the text and repeats are rare.
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**_SHAPE, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=40),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
}
_SMALL = LlamaConfig(**{**_SHAPE, "hidden_size": 32, "num_hidden_layers": 1})
HOSTILE = (
    "random-tree",
    "always-wrong",
    "duplicates",
    "huge",
    "changing",
    "malformed",
    "failing",
)
"""Drafting methods that must not matter, of tests/drafter/adversaries.py."""


def write_model(name: str, folder: Path) -> None:
    """A random model of a family, or of the small drafter, in fp32."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(FAMILIES.get(name, _SMALL), dtype=torch.float32)
    model.save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, the same in every folder: id = byte, spare ids above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {f"<spare{i}>": i for i in range(len(alphabet), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 4 to 60 random tokens; every other one repeats itself, for n-gram matches."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: tuple[int, ...]) -> Any:
        return torch.randint(low, high, size, generator=generator)

    prompts = []
    for index in range(count):
        text = draw(0, VOCABULARY, (int(draw(4, 31, (1,))),)).tolist()
        prompts.append(text + text[: len(text) // 2] if index % 2 else text)
    return prompts


def reference(folder: Path, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """What transformers' greedy generate says, one prompt at a time, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
            outputs.append(output[0, len(prompt) :].tolist())
    return outputs


SPAWNED: set[int] = set()
"""Process ids of all services that these tests started."""


def shared_memory_segments() -> set[str]:
    """KV segments in shared memory now of services that these tests started, dead or alive."""
    names = (name.split("-") for name in os.listdir("/dev/shm") if name.startswith("paceline-"))
    return {"-".join(parts) for parts in names if parts[1].isdigit() and int(parts[1]) in SPAWNED}
