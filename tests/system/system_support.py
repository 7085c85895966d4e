"""Tiny models, prompts, generations and reference outputs for tests with real processes."""

import asyncio
import os
from collections.abc import Callable, Sequence
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

from paceline.client import Client, DraftOptions, GenerationResult
from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel, save_dspark
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)

VOCABULARY = 320
THREADS = {"OMP_NUM_THREADS": "1"}
EAGER = DraftOptions(timeout=60, first_delay=0.05, longest_delay=0.1, adaptive=False)
"""Drafts in every round, on any machine, for tests of drafting."""
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


def write_layer(target: Path, folder: Path) -> Path:
    """A LongSpec layer of random weights: its drafts are poor, its reads of the KV are real."""
    torch.manual_seed(0)
    config = LongSpecConfig.for_target(target, window=24)
    weights = LongSpecModel(config).state_dict()
    save_longspec(folder, config, weights, TargetRef.of(target), dtype=torch.float32)
    return folder


def write_block(target: Path, folder: Path) -> Path:
    """A DSpark drafter of random weights."""
    torch.manual_seed(0)
    config = DSparkConfig.for_target(
        target, taps=(0, 1), block=4, mask_token=2, window=24, markov_rank=8
    )
    weights = DSparkModel(config).state_dict()
    save_dspark(folder, config, weights, TargetRef.of(target), dtype=torch.float32)
    return folder


async def generate_all(
    client: Client, prompts: Sequence[list[int]], drafter: str, tokens: int, **options: Any
) -> list[GenerationResult]:
    """Generate after all prompts, 8 at a time; the seed of a prompt is its index."""
    slots = asyncio.Semaphore(8)

    async def one(index: int, prompt: list[int]) -> GenerationResult:
        async with slots:
            return await client.generate(
                prompt, max_new_tokens=tokens, drafter=drafter, seed=index, **options
            )

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


async def generate_and(
    client: Client,
    prompt: Sequence[int],
    drafter: str,
    tokens: int,
    act: Callable[[], None] | None = None,
    seed: int = 3,
) -> GenerationResult:
    """Generate at temperature 1, of a client with few `unread_chunks`.

    `act` (blocking) runs in a thread after the first drafted round, while the generation waits for
    its reader.
    """
    generation = client.generate(
        list(prompt), max_new_tokens=tokens, temperature=1.0, seed=seed, drafter=drafter,
        ignore_eos=True,
    )  # fmt: skip
    async for _ in generation:
        if act is not None and generation.stats.drafted_rounds:
            await asyncio.to_thread(act)
            act = None
        elif act is not None:
            await asyncio.sleep(0.2)  # the generation waits meanwhile
    assert act is None, "nothing was drafted"
    return await generation


def ids_of(results: Sequence[GenerationResult]) -> list[list[int]]:
    """The tokens of each result."""
    return [result.token_ids for result in results]


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
    """Outputs of transformers' greedy generate, one prompt at a time, in fp32."""
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
