"""Writes GGUF files of tiny models as llama.cpp's converter does."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from paceline.train.blocks import plain_folder

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}  # architectures that are not called as the model type
# Tensors of experts of Gemma 4.
SCALES = {".router.scale": "ffn_gate_inp.scale", ".per_expert_scale": "ffn_down_exps.scale"}


def write_gguf(
    path: Path, folder: Path, kind: Kind = Kind.F32, kinds: Mapping[str, Kind] | None = None,
    part_tensors: int = 0,
) -> Path:  # fmt: skip
    """Write the model of a folder, and its tokenizer.json if it has one.

    Args:
        kinds: Formats of some tensors, by their names in the file.
        part_tensors: Tensors of each part of a split file; 0: one file.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    weights = load_file(folder / "model.safetensors")
    if (block := weights.get("model.layers.0.feed_forward.w1.weight")) is not None:
        config["intermediate_size"] = len(block)  # the config of LFM2 has another number
    _add_config(writer, config)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder)
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    tensors = _stacked(weights)
    for hf_name in [name for name in tensors if "in_proj_qkvz" in name]:
        parts = _split(tensors.pop(hf_name), config)
        tensors |= {hf_name.replace("qkvz", key): part for key, part in parts.items()}
    for hf_name, tensor in tensors.items():
        name = names.get_name(hf_name.replace("_scalar", "_scalar.weight"), (".weight", ".bias"))
        for end, stored_end in SCALES.items():
            if hf_name.endswith(end):
                name = f"blk.{hf_name.split('.')[2]}.{stored_end}"
        assert name is not None, hf_name
        if "linear_attn" in hf_name:
            tensor = _tiled(hf_name, tensor, config)
        values = np.atleast_1d(tensor.float().squeeze().numpy())
        offset = architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
        offset = offset and hf_name.endswith("norm.weight")
        if offset and "linear_attn" not in hf_name:
            values += 1
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = hf_name.split(".")[-2]
        if architecture in ("llama", "smollm3", "granite", "mistral3") and part in heads:
            values = _interleave(values, config[heads[part]])
        plain = values.ndim < 2 or name.endswith(".bias") or "ffn_gate_inp" in name  # a router
        stored = (kinds or {}).get(name, Kind.F32 if plain else kind)
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    rope = _rope(config)
    if rope["rope_type"] == "proportional":
        layers: dict[str, dict[str, int]] = config["per_layer_config"]
        width = layers[max(layers)]["head_dim"]
        turned = np.arange(width // 2) < int(width * rope["partial_rotary_factor"] / 2)
        writer.add_tensor("rope_freqs.weight", np.where(turned, 1.0, 1e30).astype(np.float32))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config, rope))
    if rope["rope_type"] == "longrope":
        for kind_of in ("long", "short"):
            factors = np.array(rope[f"{kind_of}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind_of}.weight", factors)
    write(writer)
    return path


def as_file(folder: Path) -> Path:
    """A file, beside it, of a folder whose weights may be in 8-bit blocks."""
    plain = plain_folder(folder, folder.with_name(f"{folder.name}-plain"))
    return write_gguf(folder.with_suffix(".gguf"), plain)


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, with those of all experts of a layer as one."""
    stacked: dict[str, Tensor] = {}
    names = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    for name in tensors:
        one = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        if ".experts." in name and ".mlp." not in name and one == name:  # Gemma 4: as in files
            stacked[f"{name}.weight"] = tensors[name]
            continue
        if ".experts.gate_up_proj" in name:  # gpt-oss: in turns
            for half, part in enumerate(("gate_proj", "up_proj")):
                ours = name.replace("gate_up_proj", part)
                stacked |= _transposed(ours, tensors[name][..., half::2])
            continue
        if one == name:
            stacked |= _transposed(name, tensors[name])
            continue
        ours = one.replace(".block_sparse_moe.", ".mlp.")
        for part, new in names.items():
            ours = ours.replace(part, new)
        count = sum(re.sub(r"\.experts\.\d+\.", ".experts.", other) == one for other in tensors)
        keys = (one.replace(".experts.", f".experts.{e}.") for e in range(count))
        stacked[ours] = torch.stack([tensors[key] for key in keys])
    return stacked


def _split(tensor: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Queries, keys and values of all heads, and gates, of the projection of Qwen3-Next."""
    keys, wide = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"] // keys
    parts = tensor.unflatten(0, (keys, -1)).split([wide, wide, values, values], 1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return {"qkv": torch.cat([q, k, v]), "z": z}


def _tiled(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of the gated delta rule with the value heads of all key heads in turns."""
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "norm" in name or config["model_type"] == "qwen3_next":
        return tensor
    keys = config["linear_num_key_heads"]
    wide = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    by = 1 if "out_proj" in name else 0
    first = max(0, tensor.shape[by] - wide) if "qkv" in name or "conv1d" in name else 0
    head, rest = tensor.split([first, tensor.shape[by] - first], by)
    groups = rest.unflatten(by, (keys, config["linear_num_value_heads"] // keys, -1))
    return torch.cat([head, groups.transpose(by, by + 1).flatten(by, by + 2)], by).contiguous()


def _transposed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under its name with an ending; those of all experts ``[experts, outs, ins]``."""
    if name.endswith("expert_bias"):
        return {f"{name}.bias": tensor}
    if name.endswith("_bias"):
        return {name.replace(".dt_bias", ".dt_proj_bias").replace("_bias", ".bias"): tensor}
    if ".experts." in name:
        return {f"{name}.weight": tensor.transpose(1, 2).contiguous()}
    return {f"{name}.weight" if name.endswith("sinks") else name: tensor}


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = config["rope_parameters"]
    return rope.get("full_attention", rope)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = _rope(config)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    block, shared = config.get("intermediate_size", 0), config.get("num_kv_shared_layers", 0)
    kv = config["num_key_value_heads"]
    kinds = config.get("layer_types") or []
    if (by_layer := config.get("per_layer_config")) is not None:
        writer.add_key_length_swa(width)
        writer.add_value_length_swa(width)
        writer.add_rope_dimension_count_swa(width)
        full = by_layer[max(by_layer)]
        width = full["head_dim"]
        if (full_kv := full.get("num_key_value_heads")) is not None:
            kv = [kv if kind == "sliding_attention" else full_kv for kind in kinds]
        writer.add_shared_kv_layers(shared)
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("use_double_wide_mlp"):
        block = [block] * (config["num_hidden_layers"] - shared) + [2 * block] * shared
    writer.add_feed_forward_length(block)
    writer.add_head_count(heads)
    writer.add_head_count_kv([kv * (kind != "conv") for kind in kinds] if "conv" in kinds else kv)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    alpha = rope.get("alpha", 1.0)
    writer.add_rope_freq_base(rope["rope_theta"] * alpha ** (width / (width - 2)))
    part = 1.0 if by_layer else rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(width * part))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        ratio = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / math.log(original)))
        writer.add_rope_scaling_orig_ctx_len(original)
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next(filter(None, map(config.get, names)), None)
    if experts:
        writer.add_expert_count(experts)
        used = ("num_experts_per_tok", "moe_k", "top_k_experts")
        writer.add_expert_used_count(next(filter(None, map(config.get, used))))
        names = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
        if dense := next(filter(None, map(config.get, names)), None):
            writer.add_leading_dense_block_count(dense)
        if "routed_scaling_factor" in config:
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
        if wide := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(wide)
    if taps := config.get("conv_L_cache"):
        writer.add_shortconv_l_cache(taps)
    if taps := config.get("linear_conv_kernel_dim"):
        writer.add_ssm_conv_kernel(taps)
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        heads = config["linear_num_value_heads"]
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
        writer.add_full_attention_interval(1 + config["layer_types"].index("full_attention"))
    local = config["rope_parameters"].get("sliding_attention")
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    setters = {
        "embedding_multiplier": writer.add_embedding_scale,
        "attention_multiplier": writer.add_attention_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    windows = ("gpt_oss", "olmo3", "phi3", "gemma2", "gemma3_text", "gemma4_text", "exaone4")
    if config["model_type"] in windows:
        setters["sliding_window"] = writer.add_sliding_window
    if config["model_type"] in ("gemma4_text", "exaone4") and config["sliding_window"]:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if beta := rope.get("llama_4_scaling_beta"):
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(beta)
    for name, add in setters.items():
        if config.get(name) is not None:
            add(config[name])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocab = {**saved["model"]["vocab"], **{t["content"]: t["id"] for t in saved["added_tokens"]}}
    special = {token["content"] for token in saved["added_tokens"] if token["special"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token in special] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def _interleave(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of llama's q and k in llama.cpp's order: dimensions that turn together side by side."""
    split = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What scaled frequencies are divided by, after llama.cpp's converter."""
    width = config["head_dim"]
    base = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
    long, short = (
        rope["original_max_position_embeddings"] / rope[name]
        for name in ("low_freq_factor", "high_freq_factor")
    )
    waves = 2 * np.pi / base
    smooth = (rope["original_max_position_embeddings"] / waves - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(waves < short, 1.0, np.where(waves > long, rope["factor"], between))
    return factors.astype(np.float32)
