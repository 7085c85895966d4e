"""Configuration of a model, from that of transformers; its rotary embedding."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from paceline.kernels.caches import row_width


class UnsupportedModelError(ValueError):
    """The model folder needs a feature that this decoder does not support."""


SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS = ("auto", *_FLOATS, "int8", "int4")
"""Formats of weights that can be asked for. auto: as they are stored, bfloat16 for float16."""

_TYPES = ("dtype", "kv_dtype")  # fields that are torch types

KV_CACHE_DTYPES = ("auto", *_FLOATS, "int8")
"""Types of caches that can be asked for. auto: that of hidden states. int8: with a scale a row."""


@dataclass(frozen=True)
class ModelFamily:
    """Properties of a family's layers that its config.json does not contain.

    Attributes:
        qkv_bias: Whether the q, k and v projections have a bias; None: the config's
            ``attention_bias``.
        o_bias: Whether the attention output projection has a bias; None: the config's
            ``attention_bias``.
        qk_norm: Whether q and k heads are RMS-normalised before RoPE.
        layer_types: Type of every layer; None: the config's ``layer_types``. "sliding" applies
            where the config has a ``sliding_window``.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    layer_types: Literal["full", "sliding"] | None = None


FAMILIES = {
    "llama": ModelFamily(layer_types="full"),
    "mistral": ModelFamily(layer_types="sliding"),
    "qwen2": ModelFamily(qkv_bias=True, o_bias=False),
    "qwen3": ModelFamily(qk_norm=True),
}
"""Supported families, by Hugging Face model type."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and constants of a decoder-only transformer.

    Attributes:
        model_type: Hugging Face model type.
        layers: Number of transformer layers.
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward block.
        q_heads: Query heads.
        kv_heads: Key and value heads; divides ``q_heads``.
        head_dim: Width of a head.
        vocab_size: Rows of the embedding and of the LM head.
        max_position: Longest context of the model, in tokens.
        norm_eps: Epsilon of every RMS norm.
        rope_inv_freq: Inverse frequencies after scaling, one per pair of dimensions.
        rope_scaling: Factor on cosine and sine (YaRN's attention factor), else 1.
        windows: Per layer, sliding window in tokens or None.
        qkv_bias: Whether the q, k and v projections have a bias.
        o_bias: Whether the attention output projection has one.
        mlp_bias: Whether the feed-forward projections have one.
        qk_norm: Whether q and k heads are RMS-normalised before RoPE.
        tied: Whether the LM head is the embedding.
        eos_token_ids: Tokens that end a text, from the generation config if there is one.
        bos_token_id: Token that starts a text, or None.
        dtype: Data type of hidden states, and of weights that are not quantised.
        kv_dtype: Data type of caches; int8 as in :mod:`paceline.kernels.caches`.
        weights: Format of the matrices: float32, bfloat16, int8, int4, or gguf, each as in its
            GGUF file.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    rope_scaling: float
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weights: str

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        row = row_width(self.head_dim, self.kv_dtype) * self.kv_dtype.itemsize
        return 2 * self.layers * self.kv_heads * row

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
        """The same with caches of one of ``KV_CACHE_DTYPES``.

        Raises:
            ValueError: Another type.
        """
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
        dtype = self.dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)
        return replace(self, kv_dtype=dtype)


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
    dtype = _dtype(hf, requested)
    own = stored or str(dtype).removeprefix("torch.")
    return DecoderConfig(
        model_type=hf.model_type,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        intermediate=hf.intermediate_size,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=_head_dim(hf),
        vocab_size=hf.vocab_size,
        max_position=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        rope_inv_freq=tuple(inv_freq.tolist()),
        rope_scaling=rope_scaling,
        windows=_windows(hf, family),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied=bool(hf.tie_word_embeddings),
        eos_token_ids=eos_token_ids,
        bos_token_id=hf.bos_token_id,
        dtype=dtype,
        kv_dtype=dtype,
        weights=own if requested == "auto" else requested,
    )


def _refuse_unsupported(hf: Any) -> None:
    if hf.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {hf.model_type!r} is not supported, expected one of {sorted(FAMILIES)}"
        )
    if hf.hidden_act != "silu":
        raise UnsupportedModelError(f"activation {hf.hidden_act!r} is not supported, only 'silu'")
    check_rope(hf)
    if getattr(hf, "quantization_config", None):
        raise UnsupportedModelError(
            "quantised checkpoints are not supported; use a float32 or bfloat16 one, or a GGUF file"
        )
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise UnsupportedModelError(
            f"{hf.num_attention_heads} query heads are not a multiple of "
            f"{hf.num_key_value_heads} kv heads"
        )


def check_rope(hf: Any) -> None:
    """Refuse rotary embeddings that :func:`rope_frequencies` does not support.

    Raises:
        UnsupportedModelError: Another type, or a partial one.
    """
    rope_type = hf.rope_parameters.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported, expected one of {SUPPORTED_ROPE}"
        )
    if float(hf.rope_parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial rotary embeddings are not supported")


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def rope_frequencies(hf: Any) -> tuple[Tensor, float]:
    """Inverse frequencies of the rotary embedding after scaling, and the factor on cos and sin.

    Args:
        hf: A transformers config.

    Returns:
        float32 ``[head_dim / 2]``, and the factor, which is 1 except for YaRN.
    """
    kind = hf.rope_parameters.get("rope_type", "default")
    if kind == "default":
        dim = _head_dim(hf)
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        return (1.0 / hf.rope_parameters["rope_theta"] ** exponents).float(), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf)
    return inv_freq, float(scaling)


def _windows(hf: Any, family: ModelFamily) -> tuple[int | None, ...]:
    window = getattr(hf, "sliding_window", None)
    kinds = None if family.layer_types else getattr(hf, "layer_types", None)
    if kinds is None:
        sliding = family.layer_types == "sliding" and window
        kinds = ["sliding_attention" if sliding else "full_attention"] * hf.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
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


_FIRST_ROWS = 4096


class RopeShape(Protocol):
    """The fields of :class:`paceline.decoder.DecoderConfig` that a table needs."""

    @property
    def rope_inv_freq(self) -> tuple[float, ...]: ...

    @property
    def rope_scaling(self) -> float: ...

    @property
    def max_position(self) -> int: ...


class Rope:
    """The table of a model, extended on demand.

    Angles are float32 as in transformers. Their cosines are taken in float64 and then rounded, so
    that processors with different float32 functions have the same table.
    """

    def __init__(self, config: RopeShape, device: torch.device | str) -> None:
        """Prepare the table of a model."""
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        self._scaling = config.rope_scaling
        self._max_position = config.max_position
        self._table = self._rows(min(_FIRST_ROWS, config.max_position))

    def table(self, longest: int) -> Tensor:
        """float32 ``[positions, D]`` up to at least position ``longest``: cosines, then sines."""
        if longest >= self._table.shape[0]:
            doubled = min(1 << (longest + 1).bit_length(), self._max_position)
            self._table = self._rows(max(doubled, longest + 1))
        return self._table

    def _rows(self, count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angles = (positions[:, None] * self._inv_freq).double()
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self._scaling).float()
