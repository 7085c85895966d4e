"""The supported families: what tells one from another, in config.json, tensors and GGUF files.

All run in one decoder. A family is a row of the table: which norms and biases it has, how its
tensors are called, and which fields of its transformers configuration set the decoder's switches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.decoder.config import DecoderConfig
from paceline.kernels import MAX_TAPS, DeltaShape

Values = Callable[[Any], dict[str, Any]]

# Parts in GGUF files by their Hugging Face names, parts of layers without the prefix.
GGUF_NAMES = {
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.router.choice": "exp_probs_b",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.qkv_conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj": "shortconv.in_proj",
    "linear_attn.conv": "shortconv.conv",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
}

# Tensors of layers whose names have other endings in GGUF files; the first two are of the
# gated delta rule.
GGUF_ENDINGS = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}

# Tensors beside the layers of models whose layers have inputs of their own, in folders and GGUF
# files: an embedding, a projection of the other embedding, and the norm of its outputs.
OWN_EMBEDDING = "model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"
OWN_PROJECTION = "model.per_layer_model_projection.weight", "per_layer_model_proj.weight"
OWN_NORM = "model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"

_AFTER = {"post_attention_layernorm": "post_attention_norm"}

# What models of other types need, by a part of the name of a field in config.json or of a key in a
# GGUF file.
_FEATURES = {
    "kv_lora_rank": "multi-head latent attention",
    "mamba": "state-space layers",
    "ssm": "state-space layers",
    "wkv": "RWKV layers",
    "altup": "several residual streams",
}

_SANDWICH = (
    "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def _none(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """Properties of a family's layers that its config.json does not contain."""

    model: str  # prefix of the family's classes in transformers
    reads_as: str = ""  # model type that is read instead, where transformers does not know this one
    # Whether these projections have a bias, or the config's field that says it.
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    # Queries and keys are RMS-normalised before RoPE: each head, all of a row together, or none;
    # "after": each head behind RoPE.
    qk_norm: Literal["", "heads", "rows", "after"] = ""
    # Type of every layer; None: the config's `layer_types`. "sliding" applies where the config has
    # a `sliding_window`.
    layer_types: Literal["full", "sliding"] | None = None
    # Names of the norms before and after attention, before and after the feed-forward block; "":
    # there is none.
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    # Those of layers with recurrent states instead of attention, if they are others.
    delta_norms: tuple[str, str, str, str] | None = None
    # Projections of these layers, whose rows are what :class:`paceline.kernels.Delta` reads (by key
    # head if there are two); (): the family has none. Then the output projection, and the norm; "":
    # the layers are short convolutions.
    delta_inputs: tuple[str, ...] = ()
    delta_outputs: tuple[str, str] = ("out_proj", "norm")
    delta_convolutions: tuple[str, ...] = ("qkv_conv1d",)  # of queries, keys and values
    # Projections whose rows are queries, keys and values, and gates and ups, in this order.
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    norm_offset: float = 0.0  # added to the weight of every norm
    partial_rope: bool = False  # whether the config's `partial_rotary_factor` is followed
    neighbours: bool = False  # RoPE turns neighbouring dimensions, not those half a head apart
    local_rope: bool = False  # sliding layers have a rotary embedding of their own
    # Heads of layers without a window have another number and width, and values have a norm.
    heads_by_kind: bool = False
    scaled: bool = False  # the output of each layer has a factor
    sinks: bool = False  # each query head has a sink: one extra logit in the softmax denominator
    # The feed-forward blocks are routed experts, or the config's field that says it.
    experts: bool | str = False
    beside: str = "mlp.shared_expert"  # name of the block beside them
    # Norms of what experts read and return, and of what the block beside them returns. There are a
    # norm of what the router reads and factors on shares then, too.
    expert_norms: tuple[str, ...] = ()
    router_bias: bool = False  # whether the scores of experts have a bias
    router_choice: bool = False  # whether a bias on shares chooses experts, and no more
    shared_gate: bool = False  # whether the output of the block beside the experts has a gate
    # Outputs of attention are multiplied by gates, which the q projection has behind the queries of
    # each head.
    gated: bool = False
    interleaved: bool = False  # see :class:`paceline.convert.experts.ExpertTensors`
    # Fields of :class:`paceline.decoder.DecoderConfig` by a transformers config.
    switches: Values = _none
    gguf: str = ""  # architecture in GGUF files; "": they are not read
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # parts unlike `GGUF_NAMES`
    gguf_rows: bool = False  # the files have the rows of q and k in llama's order
    gguf_values: Values = _none  # fields of the transformers config by a GGUF file's metadata

    def layer_tensors(self, of: Any, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of a layer's tensors, without the prefix of the layer.

        ``of`` has the fields of :class:`paceline.decoder.DecoderConfig` for widths, heads, biases
        and experts. Tensors of experts are named and shaped as one of all, ``[experts, ...]``; see
        :func:`expert_name`.
        """
        hidden, (kv_heads, dim, projected) = of.hidden, of.layer_heads(layer)
        shape = of.delta if layer in of.delta_layers else None
        experts, wide = of.feed_forward(layer)
        q, kv = of.q_heads * dim, kv_heads * dim
        qkv: tuple[int, ...] = (q * (1 + self.gated), kv, kv)[:projected]
        qkv = qkv if len(self.qkv) > 1 else (sum(qkv),)
        gate_up = (wide, wide) if len(self.gate_up) == 2 else (2 * wide,)
        if shape is not None:
            parts = [
                (f"linear_attn.{name}", delta_outs(name, shape), hidden, False)
                for name in self.delta_inputs
            ]
            out, norm = (f"linear_attn.{name}" for name in self.delta_outputs)
            parts += [(out, hidden, shape.values, False)]
            for name in self.delta_convolutions:
                outs = delta_outs(name, shape)
                yield f"linear_attn.{name}.weight", (outs, 1, shape.taps)
            if shape.key_dim:
                yield f"{norm}.weight", (shape.value_dim,)
                yield "linear_attn.A_log", (shape.value_heads,)
                yield "linear_attn.dt_bias", (shape.value_heads,)
        else:
            parts = [
                (f"self_attn.{name}", outs, hidden, of.qkv_bias)
                for name, outs in zip(self.qkv, qkv, strict=projected == 3)
            ]
            parts += [("self_attn.o_proj", hidden, q, of.o_bias)]
        block = "mlp.experts" if experts else "mlp"
        blocks = [
            (f"{block}.{name}", outs, hidden, of.mlp_bias)
            for name, outs in zip(self.gate_up, gate_up, strict=True)
        ]
        blocks += [(f"{block}.down_proj", hidden, wide, of.mlp_bias)]
        if experts:
            parts += [("mlp.router", experts, hidden, self.router_bias)]
            if self.router_choice:
                yield "mlp.router.choice.bias", (experts,)
        if experts and (shared := of.shared_intermediate):
            names = (f"{self.beside}.{name}" for name in ("gate_proj", "up_proj"))
            parts += [(name, shared, hidden, False) for name in names]
            parts += [(f"{self.beside}.down_proj", hidden, shared, False)]
            if self.shared_gate:
                parts += [("mlp.shared_expert_gate", 1, hidden, False)]
        if experts and self.expert_norms:
            yield from ((f"{name}.weight", (hidden,)) for name in self.expert_norms)
            yield "router.scale", (hidden,)
            yield "router.per_expert_scale", (experts,)
        for name, outs, ins, bias in parts + blocks:
            many = (experts,) if name.startswith("mlp.experts.") else ()
            yield f"{name}.weight", (*many, outs, ins)
            if bias:
                yield f"{name}.bias", (*many, outs)
        for name in filter(None, self.layer_norms(shape is not None)):
            yield f"{name}.weight", (hidden,)
        if of.qk_norm and shape is None:  # also of a family whose published models have none
            whole = self.qk_norm == "rows"
            yield "self_attn.q_norm.weight", (q if whole else dim,)
            if projected > 1:
                yield "self_attn.k_norm.weight", (kv if whole else dim,)
        if wide := of.layer_input:
            yield "per_layer_input_gate.weight", (wide, hidden)
            yield "per_layer_projection.weight", (hidden, wide)
            yield "post_per_layer_input_norm.weight", (hidden,)
        if self.scaled:
            yield "layer_scalar", (1,)
        if self.sinks:
            yield "self_attn.sinks.weight", (of.q_heads,)

    def layer_norms(self, delta: bool) -> tuple[str, str, str, str]:
        """Return the names of the norms of a layer, with the gated delta rule or with attention."""
        return self.delta_norms if delta and self.delta_norms is not None else self.norms


def own_tensors(of: Any) -> Iterator[tuple[tuple[str, str], tuple[int, ...]]]:
    """Yield names, in a folder and in a GGUF file, and shapes of the tensors beside the layers that
    layers have inputs of their own by; ``of`` as in :meth:`Family.layer_tensors`."""
    if width := of.layer_input:
        yield OWN_EMBEDDING, (of.vocab_size, of.layers * width)
        yield OWN_PROJECTION, (of.layers * width, of.hidden)
        yield OWN_NORM, (width,)


def unread_tensors(of: Any, layer: int) -> tuple[str, ...]:
    """Return names of a layer's tensors that published models have, although nothing reads them."""
    names = ("k_proj", "v_proj", "k_norm") if layer in of.shared_layers else ()
    return tuple(f"self_attn.{name}.weight" for name in names)


def delta_outs(name: str, shape: DeltaShape) -> int:
    """Return how many outputs a projection or convolution of a recurrent layer has."""
    if not shape.key_dim:
        return 3 * shape.values if name == "in_proj" else shape.values
    keys, values, heads = shape.key_heads * shape.key_dim, shape.values, shape.value_heads
    widths = {"q": keys, "k": keys, "v": values, "z": values, "g": values, "a": heads, "b": heads}
    return sum(widths[letter] for letter in name.removeprefix("in_proj_").partition("_")[0])


def expert_name(name: str, expert: int) -> str:
    """Return the name of an expert's part of a tensor of all experts."""
    return name.replace(".experts.", f".experts.{expert}.")


def _without_rope(hf: Any) -> dict[str, Any]:
    used = hf.no_rope_layers[: hf.num_hidden_layers]
    if all(used):
        return {}
    return {"ropes": tuple(int(not use) for use in used), "rope_local": (0.0,)}


def _without_global_rope(hf: Any) -> dict[str, Any]:
    """Only sliding layers have a rotary embedding, where there are any."""
    if not hf.sliding_window:
        return {}
    full = (kind == "full_attention" for kind in hf.layer_types)
    return {"ropes": tuple(map(int, full)), "rope_local": (0.0,)}


def _scaled_queries(hf: Any) -> dict[str, Any]:
    rope = hf.rope_parameters
    beta = float(rope.get("llama_4_scaling_beta") or 0.0)
    context = rope.get("original_max_position_embeddings", 0)
    if beta and not (isinstance(context, int) and context > 0):
        raise ValueError(
            f"original_max_position_embeddings is {context!r} with llama_4_scaling_beta, expected "
            "a number above 0"
        )
    return {"query_scale_beta": beta, "query_scale_context": context if beta else 0}


def _granite(hf: Any) -> dict[str, Any]:
    return {
        "embedding_scale": float(hf.embedding_multiplier),
        "attention_scale": float(hf.attention_multiplier),
        "residual_scale": float(hf.residual_multiplier),
        "logit_scale": 1 / float(hf.logits_scaling),
    }


def _granite_gguf(values: Any) -> dict[str, Any]:
    return {
        "embedding_multiplier": values.real("embedding_scale"),
        "attention_multiplier": values.real("attention.scale"),
        "residual_multiplier": values.real("residual_scale"),
        "logits_scaling": values.real("logit_scale"),
    }


def _gemma(hf: Any) -> dict[str, Any]:
    return {
        "embedding_scale": hf.hidden_size**0.5,
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "attention_cap": float(hf.attn_logit_softcapping or 0.0),
        "logit_cap": float(hf.final_logit_softcapping or 0.0),
    }


def _gemma4(hf: Any) -> dict[str, Any]:
    if hf.attention_bias:
        raise ValueError("attention_bias is true, expected attention without biases")
    layers, shared = hf.num_hidden_layers, hf.num_kv_shared_layers or 0
    first = layers - shared
    if shared < 0 or not set(hf.layer_types[first:]) <= set(hf.layer_types[: max(0, first)]):
        raise ValueError(
            f"num_kv_shared_layers is {shared} of {layers}, expected layers of the same types "
            "before them, whose keys and values they share"
        )
    width = hf.hidden_size_per_layer_input or 0
    if width and hf.vocab_size_per_layer_input != hf.vocab_size:
        raise ValueError(
            f"vocab_size_per_layer_input is {hf.vocab_size_per_layer_input}, expected that of "
            f"vocab_size, {hf.vocab_size}"
        )
    double = shared > 0 and hf.use_double_wide_mlp
    if double and hf.enable_moe_block:
        raise ValueError("use_double_wide_mlp is true, expected false in a mixture of experts")
    return {
        "shared_intermediate": hf.intermediate_size if hf.enable_moe_block else 0,
        "shared_layers": tuple(range(first, layers)),
        "layer_input": width,
        "dense_layers": tuple(range(first, layers)) if double else (),
        "dense_intermediate": 2 * hf.intermediate_size if double else 0,
        "embedding_scale": hf.hidden_size**0.5,
        "attention_scale": 1.0,
        "logit_cap": float(hf.final_logit_softcapping or 0.0),
        "keys_as_values": bool(hf.attention_k_eq_v),
    }


def _gemma4_gguf(values: Any) -> dict[str, Any]:
    full, sliding = values.heads
    cap = values.get("final_logit_softcapping")
    experts = {"enable_moe_block": True, **_experts_gguf(values)} if values.experts else {}
    return experts | {
        "layer_types": values.window_types(),
        "sliding_window": values.count("attention.sliding_window"),
        "num_key_value_heads": sliding[0],
        "head_dim": sliding[1],
        "num_global_key_value_heads": full[0],
        "global_head_dim": full[1],
        "attention_k_eq_v": values.keys_as_values,
        "final_logit_softcapping": cap and values.real("final_logit_softcapping"),
        "hidden_size_per_layer_input": values.layer_input,
        "vocab_size_per_layer_input": values.vocab_size,
        "num_kv_shared_layers": len(values.shared_layers),
        "intermediate_size": values.shared_intermediate or values.intermediate,
        "use_double_wide_mlp": bool(values.dense_layers),
    }


def _gemma_gguf(values: Any, max_layers: int) -> dict[str, Any]:
    """Files have no scale of scores: the largest model's, known by its layers, differs."""
    width = values.hidden // values.q_heads if values.layers == max_layers else values.head_dim
    return {
        "query_pre_attn_scalar": width,
        "sliding_window": values.count("attention.sliding_window"),
    }


def _gemma2_gguf(values: Any) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    known = {name: values.real(name) for name in caps}
    return _gemma_gguf(values, 46) | known


def _phi3_gguf(values: Any) -> dict[str, Any]:
    window = values.get("attention.sliding_window")  # 0: none
    context = values.get("rope.scaling.original_context_length")
    fields = {"sliding_window": values.count("attention.sliding_window") if window else None}
    return fields if context is None else fields | {"original_max_position_embeddings": context}


def _exaone_gguf(values: Any) -> dict[str, Any]:
    if values.get("attention.sliding_window") is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * values.layers}
    return {
        "sliding_window": values.count("attention.sliding_window"),
        "layer_types": values.window_types(),
    }


def _experts_gguf(values: Any) -> dict[str, Any]:
    count = values.count("expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": values.count("expert_used_count"),
        "top_k_experts": values.count("expert_used_count"),
        "norm_topk_prob": True,  # of all models of these families
        "moe_intermediate_size": values.intermediate,
    }


def _glm_gguf(values: Any) -> dict[str, Any]:
    return {
        **_experts_gguf(values),
        "n_routed_experts": values.experts,
        "n_shared_experts": values.shared_intermediate // values.intermediate,
        "first_k_dense_replace": len(values.dense_layers),
        "routed_scaling_factor": values.real("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(values.get("expert_weights_norm")),
        "use_qk_norm": values.qk_norm,
    }


def _glm_experts(hf: Any) -> dict[str, Any]:
    if (hf.n_group, hf.topk_group) != (1, 1):
        raise ValueError(f"n_group is {hf.n_group}, topk_group {hf.topk_group}: expected 1 of 1")
    return {
        "sigmoid_shares": True,
        "share_factor": float(hf.routed_scaling_factor),
        "shared_intermediate": hf.moe_intermediate_size * hf.n_shared_experts,
    }


def _ernie_experts(hf: Any) -> dict[str, Any]:
    if hf.use_bias:
        raise ValueError("use_bias is true, expected false in a mixture of experts")
    shared = hf.moe_intermediate_size * hf.moe_num_shared_experts
    return {"shared_intermediate": shared, "min_share_sum": float(hf.moe_norm_min)}


def _ernie_gguf(values: Any) -> dict[str, Any]:
    return {
        "moe_num_experts": values.experts,
        "moe_k": values.count("expert_used_count"),
        "moe_num_shared_experts": values.shared_intermediate // values.intermediate,
        "moe_layer_start_index": values.get("leading_dense_block_count") or 0,
        "moe_layer_interval": values.get("interleave_moe_layer_step") or 1,
        "moe_intermediate_size": values.intermediate,
    }


def _delta(hf: Any) -> dict[str, Any]:
    heads = hf.linear_num_key_heads, hf.linear_num_value_heads
    if heads[1] % heads[0]:
        raise ValueError(
            f"linear_num_value_heads is {heads[1]} with {heads[0]} key heads, expected a multiple"
        )
    widths = hf.linear_key_head_dim, hf.linear_value_head_dim
    return _recurrent(hf, "linear_attention", (*heads, *widths), "linear_conv_kernel_dim")


def _recurrent(hf: Any, kind: str, heads: tuple[int, ...], taps: str) -> dict[str, Any]:
    """Return layers with recurrent states, by their type, their heads and the field of taps."""
    layers = tuple(i for i, layer in enumerate(hf.layer_types) if layer == kind)
    if not 2 <= getattr(hf, taps) <= MAX_TAPS:
        raise ValueError(f"{taps} is {getattr(hf, taps)}, expected 2 to {MAX_TAPS}")
    if len(layers) == hf.num_hidden_layers:
        raise ValueError(f"layer_types are all {kind}, expected some full_attention")
    return {"delta_layers": layers, "delta_heads": (*heads, getattr(hf, taps))}


def _layer_types(values: Any, kind: str) -> list[str]:
    """Return the types of all layers; ``kind`` is the type with recurrent states."""
    kinds = ("full_attention", kind)
    return [kinds[layer in values.delta_layers] for layer in range(values.layers)]


def _convolutions(hf: Any) -> dict[str, Any]:
    if hf.conv_bias:
        raise ValueError("conv_bias is true, expected short convolutions without biases")
    heads = math.gcd(hf.hidden_size, hf.num_attention_heads)  # what threads divide them into
    return _recurrent(hf, "conv", (heads, heads, 0, hf.hidden_size // heads), "conv_L_cache")


def _convolutions_gguf(values: Any) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(values, "conv"),
        "conv_L_cache": values.delta.taps,
        "block_auto_adjust_ff_dim": False,
    }


def _convolutions_experts_gguf(values: Any) -> dict[str, Any]:
    return {
        **_convolutions_gguf(values),
        **_experts_gguf(values),
        "num_dense_layers": len(values.dense_layers),
        "routed_scaling_factor": values.real("expert_weights_scale", 1.0),
    }


def _convolutions_experts(hf: Any) -> dict[str, Any]:
    if not hf.use_expert_bias:
        raise ValueError("use_expert_bias is false, expected experts chosen with a bias")
    factor = float(hf.routed_scaling_factor)
    return _convolutions(hf) | {"sigmoid_shares": True, "share_factor": factor}


def _delta_experts(hf: Any) -> dict[str, Any]:
    return _delta(hf) | {"shared_intermediate": hf.shared_expert_intermediate_size}


def _delta_gguf(values: Any) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(values, "linear_attention"),
        "linear_num_key_heads": values.delta.key_heads,
        "linear_num_value_heads": values.delta.value_heads,
        "linear_key_head_dim": values.delta.key_dim,
        "linear_value_head_dim": values.delta.value_dim,
        "linear_conv_kernel_dim": values.delta.taps,
    }


def _delta_experts_gguf(values: Any) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": values.shared_intermediate}
    return _delta_gguf(values) | _experts_gguf(values) | shared


def _olmo_delta(hf: Any) -> dict[str, Any]:
    scale = 2.0 if hf.linear_allow_neg_eigval else 1.0
    return _delta(hf) | {"delta_eps": 1e-5, "delta_beta": scale}


_QWEN2 = Family(model="Qwen2", qkv_bias=True, o_bias=False, gguf="qwen2")
_OLMO = Family(
    model="Olmo2",
    qk_norm="rows",
    layer_types="full",
    norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    gguf="olmo2",
    gguf_names=_AFTER,
)
_ERNIE = Family(
    model="Ernie4_5",
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    layer_types="full",
    neighbours=True,
    gguf="ernie4_5",
)
_QWEN3_5 = Family(
    model="Qwen3_5",
    qk_norm="heads",
    norm_offset=1.0,
    partial_rope=True,
    gated=True,
    delta_inputs=("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"),
    switches=_delta,
    gguf="qwen35",
    gguf_names=_AFTER,
    gguf_values=_delta_gguf,
)
_LFM2 = Family(
    model="Lfm2",
    qkv_bias=False,
    o_bias=False,
    qk_norm="heads",
    delta_inputs=("in_proj",),
    delta_outputs=("out_proj", ""),
    delta_convolutions=("conv",),
    switches=_convolutions,
    gguf="lfm2",
    gguf_names={
        "model.norm": "token_embd_norm",
        "linear_attn.out_proj": "shortconv.out_proj",
    },
    gguf_values=_convolutions_gguf,
)
_SHARED: dict[str, Any] = {"experts": True, "shared_gate": True, "switches": _delta_experts}
# Supported families, by Hugging Face model type.
FAMILIES = {
    "llama": Family(model="Llama", layer_types="full", gguf="llama", gguf_rows=True),
    "mistral": Family(model="Mistral", layer_types="sliding"),
    "ministral3": Family(
        model="Ministral3",
        layer_types="sliding",
        switches=_scaled_queries,
        gguf="mistral3",
        gguf_rows=True,
    ),
    "seed_oss": Family(
        model="SeedOss",
        o_bias="attention_out_bias",
        layer_types="full",
        gguf="seed_oss",
        gguf_names=_AFTER,
    ),
    "hunyuan_v1_dense": Family(
        model="HunYuanDenseV1", layer_types="full", qk_norm="after", gguf="hunyuan-dense"
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(
        _ERNIE,
        model="Ernie4_5_Moe",
        experts=True,
        router_choice=True,
        switches=_ernie_experts,
        gguf="ernie4_5-moe",
        gguf_values=_ernie_gguf,
    ),
    "qwen2": _QWEN2,
    "mimo": replace(_QWEN2, reads_as="qwen2", gguf=""),
    "qwen3": Family(model="Qwen3", qk_norm="heads", gguf="qwen3"),
    "qwen3_moe": Family(
        model="Qwen3Moe",
        qk_norm="heads",
        layer_types="sliding",
        experts=True,
        gguf="qwen3moe",
        gguf_values=_experts_gguf,
    ),
    "mixtral": Family(
        model="Mixtral",
        layer_types="sliding",
        experts=True,
        gguf_rows=True,
        gguf_values=_experts_gguf,
    ),
    "gpt_oss": Family(
        model="GptOss",
        mlp_bias=True,
        sinks=True,
        experts=True,
        router_bias=True,
        interleaved=True,
        switches=lambda hf: {"swiglu_limit": float(hf.swiglu_limit)},
        gguf="gpt-oss",
        gguf_names=_AFTER,
        gguf_values=lambda values: {
            "sliding_window": values.count("attention.sliding_window"),
            **_experts_gguf(values),
        },
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        model="Qwen3_5Moe",
        gguf="qwen35moe",
        gguf_values=_delta_experts_gguf,
        **_SHARED,
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        model="Qwen3Next",
        delta_inputs=("in_proj_qkvz", "in_proj_ba"),
        gguf="",
        **_SHARED,
    ),
    "olmo_hybrid": replace(
        _OLMO,
        model="OlmoHybrid",
        delta_inputs=("q_proj", "k_proj", "v_proj", "b_proj", "a_proj", "g_proj"),
        delta_outputs=("o_proj", "o_norm"),
        delta_convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
        delta_norms=("input_layernorm", "", "post_attention_layernorm", ""),
        layer_types=None,
        switches=_olmo_delta,
        gguf="",
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        model="Lfm2Moe",
        experts=True,
        router_choice=True,
        switches=_convolutions_experts,
        gguf="lfm2moe",
        gguf_values=_convolutions_experts_gguf,
    ),
    "smollm3": Family(model="SmolLM3", switches=_without_rope, gguf="smollm3", gguf_rows=True),
    "granite": Family(
        model="Granite",
        layer_types="full",
        switches=_granite,
        gguf="granite",
        gguf_rows=True,
        gguf_values=_granite_gguf,
    ),
    "glm4_moe": Family(
        model="Glm4Moe",
        o_bias=False,
        qk_norm="heads",
        layer_types="full",
        partial_rope=True,
        experts=True,
        router_choice=True,
        switches=_glm_experts,
        gguf="glm4moe",
        gguf_names=_AFTER,
        gguf_values=_glm_gguf,
    ),
    "granite_swa": Family(model="GraniteSWA", sinks=True, switches=_granite),
    "exaone4": replace(
        _OLMO,
        model="Exaone4",
        qk_norm="heads",
        layer_types=None,
        switches=_without_global_rope,
        gguf="exaone4",
        gguf_values=_exaone_gguf,
    ),
    "olmo2": _OLMO,
    "olmo3": replace(
        _OLMO,
        model="Olmo3",
        layer_types=None,
        local_rope=True,
        gguf_values=lambda values: {"sliding_window": values.count("attention.sliding_window")},
    ),
    "phi3": Family(
        model="Phi3",
        qkv_bias=False,
        o_bias=False,
        layer_types="sliding",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        partial_rope=True,
        gguf="phi3",
        gguf_values=_phi3_gguf,
    ),
    "gemma2": Family(
        model="Gemma2",
        norms=_SANDWICH,
        norm_offset=1.0,
        switches=_gemma,
        gguf="gemma2",
        gguf_names=_AFTER,
        gguf_values=_gemma2_gguf,
    ),
    "gemma3_text": Family(
        model="Gemma3",
        norms=_SANDWICH,
        norm_offset=1.0,
        qk_norm="heads",
        local_rope=True,
        switches=_gemma,
        gguf="gemma3",
        gguf_names=_AFTER,
        gguf_values=lambda values: _gemma_gguf(values, 62),
    ),
    "gemma4_text": Family(
        model="Gemma4",
        norms=_SANDWICH,
        qk_norm="heads",
        local_rope=True,
        heads_by_kind=True,
        scaled=True,
        experts="enable_moe_block",
        beside="mlp",
        expert_norms=(
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
        ),
        switches=_gemma4,
        gguf="gemma4",
        gguf_names=_AFTER,
        gguf_values=_gemma4_gguf,
    ),
    "glm4": Family(
        model="Glm4",
        o_bias=False,
        layer_types="full",
        norms=(
            "input_layernorm", "post_self_attn_layernorm",
            "post_attention_layernorm", "post_mlp_layernorm",
        ),
        gate_up=("gate_up_proj",),
        partial_rope=True,
        neighbours=True,
        gguf="glm4",
    ),
}  # fmt: skip


def refusal(kind: str, name: str, known: Iterable[str], fields: Mapping[str, Any]) -> str:
    """Return why a model is refused: the first feature among its fields that no family has, or the
    types that are known.

    ``kind``, ``name``: what types are called there, and the model's.
    """
    used = [key.lower() for key, value in fields.items() if value]
    for part, feature in _FEATURES.items():
        if any(part in key for key in used):
            return f"{kind} {name!r} needs {feature}, which this decoder does not have"
    return f"{kind} {name!r} is not supported, expected one of {', '.join(sorted(known))}"


def layer_shapes(config: DecoderConfig, layer: int = -1) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a layer (-1: one with attention, and experts if there
    are any), by names without the prefix of the layer; experts' tensors are one by one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in FAMILIES[config.model_type].layer_tensors(config, layer):
        if ".experts." in name:
            shapes |= {expert_name(name, expert): shape[1:] for expert in range(shape[0])}
        else:
            shapes[name] = shape
    return shapes
