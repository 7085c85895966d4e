"""Configuration of a model, from that of transformers; its rotary embedding."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline.decoder.families import FAMILIES, Family
from paceline.formats import FLOATS, KV_CACHE_DTYPES, WEIGHTS
from paceline.kernels import MAX_EXPERTS, DeltaShape
from paceline.kernels.caches import row_width

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
_FLOATS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}
# A format of stored weights: experts in 8-bit blocks of the same values, the rest in `dtype`.
MXFP4 = "mxfp4"

_TYPES = ("dtype", "kv_dtype")  # fields that are torch types
_FIRST_ROWS = 4096


class UnsupportedModelError(ValueError):
    """The model folder needs a feature that this decoder does not support."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and constants of a decoder-only transformer."""

    model_type: str  # Hugging Face model type
    layers: int  # number of transformer layers
    hidden: int  # width of the residual stream
    intermediate: int  # width of the feed-forward block
    q_heads: int  # query heads
    kv_heads: int  # key and value heads; divides `q_heads`
    head_dim: int  # width of a head
    vocab_size: int  # rows of the embedding and of the LM head
    max_position: int  # longest context of the model, in tokens
    norm_eps: float  # epsilon of every RMS norm
    # Inverse frequencies after scaling, one per pair of dimensions; 0: a pair that is not turned.
    rope_inv_freq: tuple[float, ...]
    rope_scaling: float  # factor on cosine and sine (YaRN's attention factor), else 1
    windows: tuple[int | None, ...]  # per layer, sliding window in tokens or None
    qkv_bias: bool  # whether the q, k and v projections have a bias
    o_bias: bool  # whether the attention output projection has one
    mlp_bias: bool  # whether the feed-forward projections have one
    qk_norm: bool  # whether q and k heads are RMS-normalised before RoPE
    tied: bool  # whether the LM head is the embedding
    # Tokens that end a text, from the generation config if there is one.
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None  # token that the tokenizer puts before a text, or None
    dtype: torch.dtype  # data type of hidden states, and of weights that are not quantised
    kv_dtype: torch.dtype  # data type of caches; int8 as in :mod:`paceline.kernels.caches`
    # Format of the matrices: float32, bfloat16, int8, int4, `MXFP4`, or gguf, each as in its GGUF
    # file.
    weights: str
    # Rotary embedding of each layer: 0 is the first, 1 that of `rope_local`; empty: 0.
    ropes: tuple[int, ...] = ()
    # Inverse frequencies of the second rotary embedding, or one for all pairs.
    rope_local: tuple[float, ...] = ()
    # Inverse frequencies of "longrope" for contexts up to `rope_short_context`.
    rope_short: tuple[float, ...] = ()
    rope_short_context: int = 0  # longest context of `rope_short`; 0: there are no such frequencies
    norm_offset: float = 0.0  # added to the weight of every norm
    # Whether the feed-forward activation is GELU (in its form with tanh), not SiLU.
    gelu: bool = False
    attention_scale: float | None = None  # factor on attention scores; None: `head_dim ** -0.5`
    attention_cap: float = 0.0  # soft cap of attention scores (Gemma 2); 0: none
    logit_cap: float = 0.0  # soft cap of logits; 0: none
    logit_scale: float = 1.0  # factor on logits
    embedding_scale: float = 1.0  # factor on embedded tokens
    # Factor on what attention and feed-forward block add to the residual stream.
    residual_scale: float = 1.0
    experts: int = 0  # experts of a layer, each of width `intermediate`; 0: one feed-forward block
    experts_per_token: int = 0  # experts that a row is routed to
    # Whether their shares are a softmax over their scores, not over all.
    norm_topk_prob: bool = False
    # Limit of gates and ups in the feed-forward activation of gpt-oss; 0: another activation.
    swiglu_limit: float = 0.0
    # Layers with the gated delta rule instead of attention, rising.
    delta_layers: tuple[int, ...] = ()
    # Key heads, value heads, their widths, and taps of the convolution of these layers; see
    # :class:`paceline.kernels.DeltaShape`.
    delta_heads: tuple[int, ...] = ()

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values. Caches, and readers of caches, count these alone."""
        return self.layers - len(self.delta_layers)

    @property
    def delta(self) -> DeltaShape | None:
        """Shape of the layers with the gated delta rule, if there are any."""
        if not self.delta_layers:
            return None
        return DeltaShape(len(self.delta_layers), *self.delta_heads)

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers that have them."""
        row = row_width(self.head_dim, self.kv_dtype) * self.kv_dtype.itemsize
        return 2 * self.kv_layers * self.kv_heads * row

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON can store them."""
        types = {name: str(getattr(self, name)).removeprefix("torch.") for name in _TYPES}
        return {**asdict(self), **types}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_json`."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        types = {name: getattr(torch, fields[name]) for name in _TYPES}
        return cls(**{**fields, **lists, **types})

    def with_kv(self, kv_cache_dtype: str) -> DecoderConfig:
        """The configuration with caches of a type of ``KV_CACHE_DTYPES``.

        Raises ``ValueError``: another type.
        """
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
        dtype = self.dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)
        return replace(self, kv_dtype=dtype)

    def with_context(self, max_context: int | None) -> DecoderConfig:
        """The configuration for texts of at most so many tokens, which may have another RoPE."""
        if max_context is None or max_context > self.rope_short_context:
            return self
        return replace(self, rope_inv_freq=self.rope_short)


def decoder_config(
    hf: Any,
    eos_token_ids: tuple[int, ...],
    weights: torch.dtype | str,
    stored: str | None = None,
) -> DecoderConfig:
    """The decoder's configuration from one of transformers.

    Args:
        hf: The transformers config.
        eos_token_ids: Tokens that end a text.
        weights: One of ``WEIGHTS``, or a torch type.
        stored: Format of the weights as they are stored; None: that of the model's type.

    Raises:
        UnsupportedModelError: Architecture, feature or format that is not supported.
    """
    requested = str(weights).removeprefix("torch.")
    if requested not in WEIGHTS:
        raise UnsupportedModelError(
            f"weights are {requested!r}, expected one of {', '.join(WEIGHTS)}"
        )
    _refuse_unsupported(hf)
    family, attention_bias = FAMILIES[hf.model_type], bool(getattr(hf, "attention_bias", False))
    inv_freq, rope_scaling = rope_frequencies(hf)
    windows = _windows(hf, family)
    try:
        switches = family.switches(hf)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if family.local_rope:
        local, _ = rope_frequencies(hf, "sliding_attention")
        ropes = tuple(int(window is not None) for window in windows)
        switches |= {"ropes": ropes, "rope_local": tuple(local.tolist())}
    if family.experts:
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
    own = stored or _quantisation(hf) or str(dtype).removeprefix("torch.")
    return DecoderConfig(
        model_type=hf.model_type,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        intermediate=getattr(hf, "moe_intermediate_size", None) or hf.intermediate_size,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=_head_dim(hf),
        vocab_size=hf.vocab_size,
        max_position=_context(hf, family),
        norm_eps=hf.rms_norm_eps,
        rope_inv_freq=tuple(inv_freq.tolist()),
        rope_scaling=rope_scaling,
        windows=windows,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False))
        if family.mlp_bias is None
        else family.mlp_bias,
        qk_norm=bool(family.qk_norm),
        tied=bool(hf.tie_word_embeddings),
        eos_token_ids=eos_token_ids,
        bos_token_id=hf.bos_token_id,
        dtype=dtype,
        kv_dtype=dtype,
        weights=own if requested == "auto" else requested,
        norm_offset=family.norm_offset,
        gelu=_activation(hf) != "silu",
        **switches,
    )


def _context(hf: Any, family: Family) -> int:
    """The longest text of a model. Frequencies that are divided by a factor make it longer, as vLLM
    has it: YaRN's to the factor times the original length, whatever the config names besides;
    linear ones to the factor times the length. Gemma's configs name the longer one."""
    found = rope_parameters(hf)
    kind, context = found.get("rope_type", "default"), hf.max_position_embeddings
    if kind == "yarn":
        context = found.get("original_max_position_embeddings") or context
    elif kind != "linear" or family.local_rope:
        return int(context)
    return int(context * float(found.get("factor") or 1.0))


def _experts(hf: Any) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    experts = getattr(hf, "num_local_experts", None) or hf.num_experts
    used = hf.num_experts_per_tok
    numbers = isinstance(used, int) and isinstance(experts, int)
    if not numbers or not 1 <= used <= experts <= MAX_EXPERTS:
        raise UnsupportedModelError(
            f"num_experts_per_tok is {used} of {experts} experts, expected 1 or more of at most "
            f"{MAX_EXPERTS}"
        )
    if getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1:
        raise UnsupportedModelError(
            "layers without experts are not supported in a mixture of experts; expected "
            "mlp_only_layers [] and decoder_sparse_step 1"
        )
    return {
        "experts": experts,
        "experts_per_token": used,
        "norm_topk_prob": bool(getattr(hf, "norm_topk_prob", True)),
    }


def _refuse_unsupported(hf: Any) -> None:
    if hf.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {hf.model_type!r} is not supported, expected one of {sorted(FAMILIES)}"
        )
    if _activation(hf) not in ("silu", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(
            f"activation {_activation(hf)!r} is not supported, expected 'silu' or "
            "'gelu_pytorch_tanh'"
        )
    if getattr(hf, "swiglu_alpha", 1.702) != 1.702:
        raise UnsupportedModelError(f"swiglu_alpha is {hf.swiglu_alpha}, expected 1.702")
    if getattr(hf, "use_bidirectional_attention", False):
        raise UnsupportedModelError("attention in both directions is not supported")
    check_rope(hf, partial=FAMILIES[hf.model_type].partial_rope)
    if _quantisation(hf) not in ("", MXFP4):
        raise UnsupportedModelError(
            f"checkpoints quantised by {_quantisation(hf)!r} are not supported; use a float32 or "
            f"bfloat16 one, one in {MXFP4}, or a GGUF file"
        )
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise UnsupportedModelError(
            f"{hf.num_attention_heads} query heads are not a multiple of "
            f"{hf.num_key_value_heads} kv heads"
        )


def _quantisation(hf: Any) -> str:
    """The method by which a checkpoint is quantised, "" if it is not."""
    found = getattr(hf, "quantization_config", None) or {}
    return str(found.get("quant_method", "unknown")) if found else ""


def _activation(hf: Any) -> str:
    return str(getattr(hf, "hidden_activation", None) or hf.hidden_act)


def rope_parameters(hf: Any, layers: str = "full_attention") -> dict[str, Any]:
    """``rope_parameters`` of a transformers config, of one kind of layers if there are several."""
    found = hf.rope_parameters
    return dict(found.get(layers, found))


def check_rope(hf: Any, *, partial: bool = True) -> None:
    """Refuse rotary embeddings that :func:`rope_frequencies` does not support, and, unless
    ``partial``, those that leave dimensions of a head as they are. Raises
    ``UnsupportedModelError``: it is one."""
    for layers in ("full_attention", "sliding_attention"):
        rope_type = rope_parameters(hf, layers).get("rope_type", "default")
        if rope_type not in SUPPORTED_ROPE:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported, expected one of {SUPPORTED_ROPE}"
            )
    if not partial and _rotary_width(hf) != _head_dim(hf):
        raise UnsupportedModelError(
            f"partial rotary embeddings are not supported in models of type {hf.model_type!r}"
        )


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _rotary_width(hf: Any) -> int:
    """Dimensions of a head that are turned."""
    return int(_head_dim(hf) * float(rope_parameters(hf).get("partial_rotary_factor", 1.0)))


def rope_frequencies(
    hf: Any, layers: str = "full_attention", context: int | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies of the rotary embedding after scaling, and the factor on cos and sin.

    Frequencies of "longrope" depend on the length of a text in transformers. Here they must not:
    those of long texts are used if the context is longer than the original one.

    Args:
        hf: A transformers config.
        layers: A kind of layers, where the config has rotary embeddings by kind.
        context: Maximum length of texts; None: that of the model.

    Returns:
        float32 ``[head_dim / 2]``, with 0 for dimensions that are not turned, and the factor, which
        is 1 except for YaRN and "longrope".
    """
    found = rope_parameters(hf, layers)
    kind, width = found.get("rope_type", "default"), _rotary_width(hf)
    scaling = 1.0
    if kind == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        inv_freq = (1.0 / found["rope_theta"] ** exponents).float()
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        by_kind: dict[str, Any] = {"layer_type": layers} if layers in hf.rope_parameters else {}
        if kind == "longrope":
            by_kind["seq_len"] = context or hf.max_position_embeddings
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, **by_kind)
    return torch.nn.functional.pad(inv_freq, (0, (_head_dim(hf) - width) // 2)), float(scaling)


def head_order(config: DecoderConfig) -> Tensor | None:
    """Dimensions of a head in the order of :class:`Rope`, int64 ``[head_dim]``; None: as they are.

    The table turns dimensions half a head apart. Where a model turns others, the rows of its q and
    k projections are put in this order, which does not change a score.
    """
    turned = 2 * sum(each != 0.0 for each in config.rope_inv_freq)
    neighbours = FAMILIES[config.model_type].neighbours
    if turned == config.head_dim and not neighbours:
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
    known = {"full_attention", "sliding_attention", *(["linear_attention"] if family.gated else [])}
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
    """The type that ``weights`` names, otherwise the model's own; bfloat16 for float16."""
    if weights in _FLOATS:
        return _FLOATS[weights]
    own = str(getattr(hf, "dtype", None) or torch.float32).removeprefix("torch.")
    found = _FLOATS.get("bfloat16" if own == "float16" else own)
    if found is None:
        raise UnsupportedModelError(
            f"the model's dtype {own!r} is not supported, expected {', '.join(_FLOATS)} or float16"
        )
    return found


class RopeShape(Protocol):
    """The fields of :class:`paceline.decoder.DecoderConfig` that a table needs."""

    @property
    def rope_inv_freq(self) -> tuple[float, ...]: ...

    @property
    def rope_scaling(self) -> float: ...

    @property
    def max_position(self) -> int: ...


class Rope:
    """The table of a model, or two tables, extended on demand.

    Angles are float32 as in transformers. Their cosines are taken in float64 and then rounded, so
    that processors with different float32 functions have the same table.
    """

    def __init__(self, config: RopeShape, device: torch.device | str) -> None:
        """Prepare the table of a model."""
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        # Dimensions that are not turned are not scaled either.
        self._scaling = torch.where(self._inv_freq == 0, 1.0, config.rope_scaling).repeat(2)
        if local := getattr(config, "rope_local", ()):
            second = torch.tensor(local, dtype=torch.float32, device=device)
            self._inv_freq = torch.stack([self._inv_freq, second.expand_as(self._inv_freq)])
            self._scaling = torch.stack([self._scaling, torch.ones_like(self._scaling)])[:, None]
            self._inv_freq = self._inv_freq[:, None]
        self._max_position = config.max_position
        self._table = self._rows(min(_FIRST_ROWS, config.max_position))

    def table(self, longest: int) -> Tensor:
        """float32 ``[positions, D]`` up to at least position ``longest``: cosines, then sines.

        Two tables are ``[2, positions, D]``.
        """
        if longest >= self._table.shape[-2]:
            doubled = min(1 << (longest + 1).bit_length(), self._max_position)
            self._table = self._rows(max(doubled, longest + 1))
        return self._table

    def _rows(self, count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angles = (positions[:, None] * self._inv_freq).double()
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self._scaling).float()
