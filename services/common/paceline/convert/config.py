"""The decoder's configuration from one of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.convert.families import FAMILIES, Family, refusal
from paceline.decoder.config import DecoderConfig, UnsupportedModelError
from paceline.formats import FLOATS, WEIGHTS
from paceline.kernels import MAX_EXPERTS

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
_FLOATS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}
# A format of stored weights: experts in 8-bit blocks of the same values, the rest in `dtype`.
MXFP4 = "mxfp4"


def decoder_config(
    hf: Any, eos_token_ids: tuple[int, ...], weights: torch.dtype | str, stored: str | None = None
) -> DecoderConfig:
    """Return the decoder's configuration from one of transformers.

    Args:
        hf: The transformers config.
        eos_token_ids: Tokens that end a text.
        weights: One of ``WEIGHTS``, or a torch type.
        stored: Format of the weights as they are stored; None: the format of the model's type.

    Raises ``UnsupportedModelError`` if an architecture, feature or format is not supported.
    """
    requested = str(weights).removeprefix("torch.")
    if requested not in WEIGHTS:
        raise UnsupportedModelError(
            f"weights are {requested!r}, expected one of {', '.join(WEIGHTS)}"
        )
    _refuse_unsupported(hf)
    family = FAMILIES[hf.model_type]

    def holds(field: bool | str) -> bool:
        return bool(getattr(hf, field, False)) if isinstance(field, str) else field

    (kv_heads, head_dim), stored_heads = _heads(hf)
    inv_freq, rope_scaling = rope_frequencies(hf)
    windows = _windows(hf, family)
    try:
        switches = family.switches(hf)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if thetas := getattr(hf, "layer_rope_theta", None):
        inv_freq, rest = _frequencies_by_layer(hf, thetas)
        switches |= rest
    if family.local_rope:
        local, _ = rope_frequencies(hf, "sliding_attention")
        ropes = tuple(int(window is not None) for window in windows)
        switches |= {"ropes": ropes, "rope_local": tuple(local.tolist())}
    if holds(family.experts):
        switches |= _experts(hf)
    if rope_parameters(hf).get("rope_type") == "longrope":
        original = rope_parameters(hf).get("original_max_position_embeddings")
        if not isinstance(original, int):
            raise UnsupportedModelError(
                f"original_max_position_embeddings of longrope is {original!r}, expected a number"
            )
        short, _ = rope_frequencies(hf, context=original)
        switches |= {"rope_short": tuple(short.tolist()), "rope_short_context": original}
    dtype = _dtype(hf, requested)
    stored_weights = stored or _quantisation(hf) or str(dtype).removeprefix("torch.")
    config = DecoderConfig(
        model_type=hf.model_type,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        intermediate=_intermediate(hf),
        q_heads=hf.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        stored_heads=stored_heads,
        vocab_size=hf.vocab_size,
        max_position=_context(hf, family),
        norm_eps=hf.norm_eps if hasattr(type(hf), "norm_eps") else hf.rms_norm_eps,
        rope_inv_freq=tuple(inv_freq.tolist()),
        rope_scaling=rope_scaling,
        windows=windows,
        qkv_bias=holds(family.qkv_bias),
        o_bias=holds(family.o_bias),
        mlp_bias=holds(family.mlp_bias),
        qk_norm=bool(family.qk_norm) and getattr(hf, "use_qk_norm", True),
        tied=bool(hf.tie_word_embeddings),
        eos_token_ids=eos_token_ids,
        bos_token_id=hf.bos_token_id,
        dtype=dtype,
        kv_dtype=dtype,
        weights=stored_weights if requested in ("auto", "stored") else requested,
        norm_offset=family.norm_offset,
        gelu=_activation(hf) != "silu",
        gated=family.gated,
        **switches,
    )
    for name, value in vars(config).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UnsupportedModelError(f"{name} has {number}, expected finite numbers")
    return config


def _intermediate(hf: Any) -> int:
    """Return the width of a feed-forward block, or of an expert. LFM2 names the one that its own is
    made of."""
    expert = getattr(hf, "enable_moe_block", True) and getattr(hf, "moe_intermediate_size", None)
    wide = expert or hf.intermediate_size
    if getattr(hf, "block_auto_adjust_ff_dim", False):
        wide, step = int(2 * wide / 3), hf.block_multiple_of
        if hf.block_ffn_dim_multiplier is not None:
            wide = -(-int(hf.block_ffn_dim_multiplier * wide) // step) * step
    return int(wide)


def _context(hf: Any, family: Family) -> int:
    """Return the longest text of a model. Frequencies that are divided by a factor make it longer,
    as vLLM has it: YaRN's to the factor times the original length, whatever the config names
    besides; linear ones to the factor times the length. Gemma's configs name the longer one."""
    rope = rope_parameters(hf)
    kind, context = rope.get("rope_type", "default"), hf.max_position_embeddings
    if kind == "yarn":
        context = rope.get("original_max_position_embeddings") or context
    elif kind != "linear" or family.local_rope:
        return int(context)
    return int(context * float(rope.get("factor") or 1.0))


def _experts(hf: Any) -> dict[str, Any]:
    """Return the fields of a mixture of experts."""
    experts = getattr(hf, "num_local_experts", None) or hf.num_experts
    used: Any = getattr(hf, "top_k_experts", None) or getattr(hf, "num_experts_per_tok", None)
    numbers = isinstance(used, int) and isinstance(experts, int)
    if not numbers or not 1 <= used <= experts <= MAX_EXPERTS:
        raise UnsupportedModelError(
            f"num_experts_per_tok is {used} of {experts} experts, expected 1 or more of at most "
            f"{MAX_EXPERTS}"
        )
    dense = _dense_layers(hf)
    if len(dense) == hf.num_hidden_layers:
        raise UnsupportedModelError("no layer of the mixture of experts has experts")
    return {
        "dense_layers": dense,
        "dense_intermediate": hf.intermediate_size if dense else 0,
        "experts": experts,
        "experts_per_token": used,
        "norm_topk_prob": bool(getattr(hf, "norm_topk_prob", True)),
    }


def _dense_layers(hf: Any) -> tuple[int, ...]:
    """Return layers without experts, by the fields of all families."""
    count = hf.num_hidden_layers
    step = getattr(hf, "decoder_sparse_step", None) or getattr(hf, "moe_layer_interval", None) or 1
    names = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    first = next(filter(None, (getattr(hf, name, 0) for name in names)), 0)
    last = getattr(hf, "moe_layer_end_index", count)
    named = set(getattr(hf, "mlp_only_layers", None) or ())
    return tuple(i for i in range(count) if not first <= i <= last or (i + 1) % step or i in named)


def _refuse_unsupported(hf: Any) -> None:
    if hf.model_type not in FAMILIES:
        raise UnsupportedModelError(refusal("model type", hf.model_type, FAMILIES, vars(hf)))
    if _head_dim(hf) % 2:
        raise UnsupportedModelError(f"heads have an odd width, {_head_dim(hf)}")
    if _activation(hf) not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(
            f"activation {_activation(hf)!r} is not supported, expected 'silu' or "
            "'gelu_pytorch_tanh'"
        )
    if getattr(hf, "swiglu_alpha", 1.702) != 1.702:
        raise UnsupportedModelError(f"swiglu_alpha is {hf.swiglu_alpha}, expected 1.702")
    if getattr(hf, "use_bidirectional_attention", False) not in (None, False, "vision"):
        raise UnsupportedModelError("attention in both directions is not supported")
    check_rope(hf, partial=FAMILIES[hf.model_type].partial_rope)
    if _quantisation(hf) not in ("", MXFP4):
        raise UnsupportedModelError(
            f"checkpoints quantised by {_quantisation(hf)!r} are not supported; use a float32 or "
            f"bfloat16 one, one in {MXFP4}, or a GGUF file"
        )
    (kv_heads, dim), stored = _heads(hf)
    if hf.num_attention_heads % kv_heads:
        raise UnsupportedModelError(
            f"{hf.num_attention_heads} query heads are not a multiple of {kv_heads} kv heads"
        )
    counts, widths = stored[::2], stored[1::2]
    if any(kv_heads % count for count in counts) or any(
        width % 2 or dim > widths[0] for width in widths
    ):
        raise UnsupportedModelError(
            f"full and sliding layers have {counts} kv heads of widths {widths}, expected a number "
            "and a multiple of it, and even widths, the first at least as wide"
        )


def _quantisation(hf: Any) -> str:
    """Return the method by which a checkpoint is quantised, "" if it is not."""
    described = getattr(hf, "quantization_config", None) or {}
    return str(described.get("quant_method", "unknown")) if described else ""


def _activation(hf: Any) -> str:
    return str(getattr(hf, "hidden_activation", None) or getattr(hf, "hidden_act", "silu"))


def rope_parameters(hf: Any, layers: str = "full_attention") -> dict[str, Any]:
    """``rope_parameters`` of a transformers config, of one kind of layers if there are several.
    Hunyuan's "dynamic" ones with a fixed `alpha` are default ones with a larger base."""
    rope = hf.rope_parameters or {}
    rope = dict(rope.get(layers, rope))
    if rope.get("rope_type") == "dynamic" and (alpha := rope.pop("alpha", None)):
        width = _head_dim(hf)
        if width == 2 or not 0 < float(alpha) < math.inf:
            raise UnsupportedModelError(
                f"alpha is {alpha!r} for heads of {width}, expected a finite one above 0 and more "
                "than 2 dimensions"
            )
        theta = rope["rope_theta"] * float(alpha) ** (width / (width - 2))
        rope |= {"rope_type": "default", "rope_theta": theta}
    return rope


def _frequencies_by_layer(hf: Any, thetas: Sequence[float]) -> tuple[Tensor, dict[str, Any]]:
    """Return inverse frequencies of the largest base, and the switches for layers with another one;
    base 0: none."""
    first, *others = sorted(set(thetas), reverse=True)
    scaled = rope_parameters(hf).get("rope_type", "default") != "default"
    if len(thetas) != hf.num_hidden_layers or len(others) > 1 or first <= 0 or scaled:
        raise UnsupportedModelError(
            f"layer_rope_theta is {list(thetas)} with rope parameters {rope_parameters(hf)}; "
            f"expected one or two bases for {hf.num_hidden_layers} layers, and no scaling"
        )
    width = _rotary_width(hf)
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    inv_freq = (1.0 / float(first) ** exponents).float()
    if not others:
        return inv_freq, {}
    local = (1.0 / float(others[0]) ** exponents).float().tolist() if others[0] else [0.0]
    ropes = tuple(int(theta != first) for theta in thetas)
    return inv_freq, {"ropes": ropes, "rope_local": tuple(local)}


def check_rope(hf: Any, *, partial: bool = True) -> None:
    """Refuse rotary embeddings that :func:`rope_frequencies` does not support, and, unless
    ``partial``, those that leave dimensions of a head as they are. Raises
    ``UnsupportedModelError`` if it is one."""
    for layers in ("full_attention", "sliding_attention"):
        rope_type = rope_parameters(hf, layers).get("rope_type", "default")
        known = (*SUPPORTED_ROPE, *(("proportional",) if _heads_differ(hf) else ()))
        if rope_type not in known:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported, expected one of {known}"
            )
    if not partial and _rotary_width(hf) != _head_dim(hf):
        raise UnsupportedModelError(
            f"partial rotary embeddings are not supported in models of type {hf.model_type!r}"
        )


def _heads_differ(hf: Any) -> bool:
    family = FAMILIES.get(getattr(hf, "model_type", ""))
    return family is not None and family.heads_by_kind


def _of_kind(hf: Any, layers: str) -> Any:
    """Return the config of a kind of layers, where heads differ by kind."""
    if not _heads_differ(hf):
        return hf
    if (by_kind := getattr(hf, "per_layer_config", None)) is None:
        raise UnsupportedModelError(
            f"this version of transformers has no heads by layer, which models of type "
            f"{hf.model_type!r} need: install a newer one, such as 5.23"
        )
    return by_kind[layers if layers in hf.layer_types else "full_attention"]


def _heads(hf: Any) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return KV heads and width of heads of all layers, and those that tensors have; see
    :class:`paceline.decoder.DecoderConfig`."""
    kinds = ("full_attention", "sliding_attention")
    shapes = [(_of_kind(hf, kind).num_key_value_heads, _head_dim(hf, kind)) for kind in kinds]
    kv_heads, dims = zip(*shapes, strict=True)
    stored = (*shapes[0], *shapes[1]) if _heads_differ(hf) else ()
    return (max(kv_heads), max(dims)), stored


def _head_dim(hf: Any, layers: str = "full_attention") -> int:
    head_dim = getattr(_of_kind(hf, layers), "head_dim", None)
    return int(head_dim or hf.hidden_size // hf.num_attention_heads)


def _rotary_width(hf: Any, layers: str = "full_attention") -> int:
    """Return a head's turned dimensions; "proportional" frequencies of others are 0."""
    rope = rope_parameters(hf, layers)
    part = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor")
    return int(_head_dim(hf, layers) * float(1.0 if part is None else part))


def rope_frequencies(
    hf: Any, layers: str = "full_attention", context: int | None = None
) -> tuple[Tensor, float]:
    """Return inverse frequencies of the rotary embedding after scaling, float32 ``[head_dim / 2]``,
    with 0 for dimensions that are not turned, and the factor on cos and sin, which is 1 except for
    YaRN and "longrope".

    Frequencies of "longrope" depend on the length of a text in transformers. Here they must not:
    frequencies of long texts are used if the ``context``, the longest text (None: of the model), is
    longer than the original one. ``layers`` is a kind of layers, where the config has rotary
    embeddings by kind.
    """
    rope = rope_parameters(hf, layers)
    kind, width = rope.get("rope_type", "default"), _rotary_width(hf, layers)
    scaling = 1.0
    turns = rope.get("rope_theta") is not None or hf.model_type != "olmo_hybrid"
    if kind == "default" and not turns:
        inv_freq = torch.zeros(width // 2)
    elif kind == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        inv_freq = (1.0 / rope["rope_theta"] ** exponents).float()
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        by_kind: dict[str, Any] = {"layer_type": layers} if layers in hf.rope_parameters else {}
        if kind == "longrope":
            by_kind["seq_len"] = context or hf.max_position_embeddings
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, **by_kind)
    return torch.nn.functional.pad(inv_freq, (0, (_head_dim(hf) - width) // 2)), float(scaling)


def head_order(config: DecoderConfig) -> Tensor | None:
    """Return a head's dimensions in the order of :class:`Rope`, int64 ``[head_dim]``; None: as is.

    The table turns dimensions half a head apart. Where a model turns others, the rows of its q and
    k projections are put in this order, which does not change a score.
    """
    turned = 2 * sum(frequency != 0.0 for frequency in config.rope_inv_freq)
    family = FAMILIES[config.model_type]
    neighbours = family.neighbours
    if (turned == config.head_dim or not family.partial_rope) and not neighbours:
        return None
    dims, rest = torch.arange(turned), torch.arange(turned, config.head_dim)
    low, high = (dims[::2], dims[1::2]) if neighbours else dims.chunk(2)
    return torch.cat([low, rest[: len(rest) // 2], high, rest[len(rest) // 2 :]])


def _windows(hf: Any, family: Family) -> tuple[int | None, ...]:
    window = getattr(hf, "sliding_window", None)
    kinds = None if family.layer_types else getattr(hf, "layer_types", None)
    if kinds is None:
        sliding = family.layer_types == "sliding" and window
        kinds = ["sliding_attention" if sliding else "full_attention"] * hf.num_hidden_layers
    known = {"full_attention", "sliding_attention"}
    if family.delta_inputs:
        known.add("linear_attention" if family.delta_outputs[1] else "conv")
    unknown = set(kinds) - known
    if unknown or len(kinds) != hf.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer types {sorted(set(kinds))} for {hf.num_hidden_layers} layers are not "
            "supported, expected 'full_attention' or 'sliding_attention' for each"
        )
    if "sliding_attention" not in kinds:
        return (None,) * len(kinds)
    if not window:
        raise UnsupportedModelError("the config has sliding_attention layers but no sliding_window")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _dtype(hf: Any, weights: str) -> torch.dtype:
    """Return the type that ``weights`` names, otherwise the model's own; bfloat16 for float16."""
    if weights in _FLOATS:
        return _FLOATS[weights]
    name = str(getattr(hf, "dtype", None) or torch.float32).removeprefix("torch.")
    dtype = _FLOATS.get("bfloat16" if name == "float16" else name)
    if dtype is None:
        raise UnsupportedModelError(
            f"the model's dtype {name!r} is not supported, expected {', '.join(_FLOATS)} or float16"
        )
    return dtype
