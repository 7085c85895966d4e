"""Tiny random models, and ways to run one sequence through the decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor

from paceline.convert import ModelSource, load_decoder
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import CHUNK, QueryBlock, plan_trees

VOCAB = 101
Change = Callable[[dict[str, Tensor]], object]

BASE = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {  # as llama.cpp has it for every file
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]
_BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_theta": 20000.0, **_YARN},
}
_LONG = {
    "rope_type": "longrope", "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 64,
}  # fmt: skip
_GLM_MOE = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 5,
    "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5, "rope_parameters": {"partial_rotary_factor": 0.5},
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 96,
    "rope_parameters": {"partial_rotary_factor": 0.25},
}  # fmt: skip
_DELTA_MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 48, "norm_topk_prob": True,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_SLIDING = {"sliding_window": 40, "layer_types": _KINDS}
_GEMMA4 = {
    **_SLIDING, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "rope_parameters": {
        "sliding_attention": _BY_KIND["sliding_attention"],
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 20000.0,
        },
    },
}  # fmt: skip
_SMALL = {  # as E2B and E4B are
    "num_hidden_layers": 5, "layer_types": [*_KINDS, _KINDS[0], *_KINDS],
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 20.0,
}  # fmt: skip
_CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "yarn": ("Qwen3", {"rope_parameters": _YARN}),
    "mistral": ("Mistral", {"sliding_window": 50, "head_dim": 32}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", {
        "rope_parameters": _YARN | {
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
        },
    }),
    "seed-oss": ("SeedOss", {"attention_bias": True, "head_dim": 32}),
    "hunyuan": ("HunYuanDenseV1", {
        "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    }),
    "ernie": ("Ernie4_5", {"tie_word_embeddings": True}),
    "ernie-bias": ("Ernie4_5", {"use_bias": True}),
    "ernie-moe": ("Ernie4_5_Moe", {
        "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2,
        "moe_intermediate_size": 64,
    }),
    "ernie-moe-min": ("Ernie4_5_Moe", {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 64, "moe_norm_min": 0.5,
        "moe_layer_start_index": 0,
    }),
    "exaone4": ("Exaone4", _SLIDING),
    "exaone4-full": ("Exaone4", {
        "sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": _LLAMA3,
    }),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {
        "use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1,
    }),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 80}),
    "qwen3-moe": ("Qwen3Moe", {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }),
    "qwen3-moe-dense": ("Qwen3Moe", {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "mlp_only_layers": [1],
    }),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64,
        "sliding_window": 30, "swiglu_limit": 1.5, "rope_parameters": _YARN | {"truncate": False},
    }),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "granite": ("Granite", {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.3125,
        "residual_multiplier": 0.21875, "logits_scaling": 6.0,
    }),
    "granite-swa": ("GraniteSWA", {
        **_SLIDING, "layer_rope_theta": [20000.0, 0], "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3125, "residual_multiplier": 0.21875, "logits_scaling": 6.0,
    }),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**_SLIDING, "rope_parameters": _BY_KIND}),
    "phi3": ("Phi3", {
        "sliding_window": 200, "original_max_position_embeddings": 64, "rope_parameters": _LONG,
    }),
    "phi3-full": ("Phi3", {"max_position_embeddings": 4096}),
    "gemma2": ("Gemma2", {**_SLIDING, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {**_SLIDING, "rope_parameters": _BY_KIND}),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4-keys": ("Gemma4", _GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False,
        "final_logit_softcapping": 20.0,
    }),
    "gemma4-small": ("Gemma4", _GEMMA4 | _SMALL),
    "gemma4-moe": ("Gemma4", _GEMMA4 | {
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64,
    }),
    "qwen3-5": ("Qwen3_5", _DELTA),
    "qwen3-5-moe": ("Qwen3_5Moe", _DELTA | _DELTA_MOE),
    "qwen3-next": ("Qwen3Next", _DELTA | _DELTA_MOE),
    "olmo-hybrid": ("OlmoHybrid", _DELTA | {
        "linear_num_key_heads": 4, "linear_value_head_dim": 16, "rope_parameters": None,
    }),
    "lfm2": ("Lfm2", _CONVOLUTIONS | {"intermediate_size": 200, "block_multiple_of": 32}),
    "lfm2-moe": ("Lfm2Moe", _CONVOLUTIONS | {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "num_dense_layers": 1, "norm_topk_prob": True,
    }),
    "glm4-moe": ("Glm4Moe", _GLM_MOE | {"use_qk_norm": True}),
    "glm4-moe-air": ("Glm4Moe", _GLM_MOE | {"attention_bias": True, "norm_topk_prob": False}),
    "glm4": ("Glm4", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
}  # fmt: skip
PARENTS = (-1, 0, 0, 1, 2, 2, 3, 6, 7, 5)  # of a tree, row 0 first


def save_model(folder: Path, name: str, *, max_shard_size: str = "50GB", **changes: Any) -> Path:
    """Make the named model with random weights, and other options if they are given; save it."""
    family, change = FAMILIES[name]
    options = BASE | change | changes
    rope = options.get("rope_parameters", {})
    if rope is not None and "full_attention" not in rope:
        options["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"} | rope
    if "vocab_size_per_layer_input" in options:
        options["vocab_size_per_layer_input"] = options["vocab_size"]
    if family in ("Qwen2", "Granite", "GraniteSWA"):
        options.pop("head_dim")
    seed = sum(name.encode())
    return make_model(
        folder, family, seed=seed, spread=_spread, max_shard_size=max_shard_size, **options
    )


def _spread(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
        else:  # norms and biases: anything but their neutral start
            parameter.data += 0.2 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0.0, 0.15)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)


def changed(source: Path, to: Path, tensors: Change | None = None, **fields: Any) -> Path:
    """A copy of a folder with other fields of config.json, and other tensors."""
    shutil.copytree(source, to)
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        weights = load_file(to / "model.safetensors")
        tensors(weights)
        save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


_LOADED: dict[tuple[Path, torch.dtype], Decoder] = {}


def load(models: dict[str, Path], name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a model, loaded once."""
    key = (models[name], dtype)
    if key not in _LOADED:
        _LOADED[key] = load_decoder(models[name], dtype)
    return _LOADED[key]


def expected_logits(folder: Path, tokens: Tensor) -> Tensor:
    """What transformers says, float32 ``[n, V]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens[None]).logits[0]
    return logits


def random_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def extend(decoder: Decoder, cache: LocalCache, tokens: Tensor, max_tokens: int = CHUNK) -> Tensor:
    """Append tokens in blocks that end at chunk borders and have at most ``max_tokens`` tokens."""
    logits: list[Tensor] = []
    done = 0
    while done < tokens.numel():
        start = len(cache)
        count = min(max_tokens, CHUNK - start % CHUNK, tokens.numel() - done)
        cache.reserve(count)
        plan = plan_trees([QueryBlock(0, start, None, count)])
        block = tokens[done : done + count]
        logits.append(decoder.forward(block, plan, [cache], logit_rows=None).logits)
        cache.commit(range(count))
        done += count
    return torch.cat(logits)


def run(decoder: Decoder, tokens: Tensor, max_tokens: int = CHUNK) -> Tensor:
    """Logits of a text."""
    return extend(decoder, LocalCache(decoder.config), tokens, max_tokens)


def logits(source: Path | ModelSource | Decoder, weights: str = "auto", count: int = 40) -> Tensor:
    """Logits of some random tokens."""
    decoder = source if isinstance(source, Decoder) else load_decoder(source, weights)
    return run(decoder, random_tokens(count))


def ask_tree(decoder: Decoder, cache: LocalCache, tokens: Tensor, parents: Sequence[int]) -> Tensor:
    """Logits of a tree behind what is committed."""
    cache.reserve(len(parents))
    block = QueryBlock(0, len(cache), tuple(parents), len(parents))
    return decoder.forward(tokens, plan_trees([block]), [cache], logit_rows=None).logits


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
