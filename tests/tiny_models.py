"""The factory of tiny random models of every family, and a tokenizer for all of them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.train.blocks import store_blocks

VOCABULARY = 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    # Wider than usual, so that the next token depends on the text and repeats are rare.
    "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
# Heads of a CPU have multiples of 16 elements.
_SMALL = ("Llama", {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16})


def make_model(
    folder: Path, family: str, *, dtype: str = "float32", seed: int = 0,
    spread: Callable[[torch.nn.Module], None] | None = None, max_shard_size: str = "50GB",
    **shape: Any,
) -> Path:  # fmt: skip
    """A random model of a family of transformers, whose weights a function may change."""
    torch.manual_seed(seed)
    text = f"{family}Text" if family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else family
    config = getattr(transformers, f"{text}Config")(**SHAPE | shape)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if spread is not None:
        spread(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_model(name: str, folder: Path) -> None:
    """A random model of one of the `FAMILIES`, or of the small drafter."""
    family, shape = FAMILIES.get(name, _SMALL)
    make_model(folder, family, seed=sum(map(ord, name)), **shape)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, the same in every folder: id = byte, spare ids above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {f"<spare{i}>": i for i in range(len(alphabet), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Learn a byte-level BPE whose id 0 both opens and ends a text."""
    end, bytelevel = "<|endoftext|>", pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = bytelevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[end], initial_alphabet=bytelevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end
    )


def write_target(
    folder: Path, texts: Iterable[str], seed: int = 0
) -> transformers.PreTrainedTokenizerFast:
    """A random llama in 8-bit blocks, and a tokenizer that is learnt from texts."""
    tokenizer = train_tokenizer(texts, VOCABULARY)
    make_model(
        folder, "Llama", dtype="bfloat16", seed=seed, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.02,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    store_blocks(folder)
    return tokenizer


def write_ending_model(folder: Path) -> None:
    """A llama whose last token ends a text, as texts by a JSON schema need."""
    write_model("llama", folder)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = VOCABULARY - 1
    tokenizer.add_special_tokens([tokenizer.id_to_token(end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
