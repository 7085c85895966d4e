"""Configuration of a model, read from a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.decoder.errors import UnsupportedModelError

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


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
        dtype: Data type of weights, activations and cache.
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

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def load_config(folder: str | Path, dtype: torch.dtype | str = "auto") -> DecoderConfig:
    """Read the configuration of a model folder.

    Args:
        folder: Hugging Face model folder.
        dtype: float32 or bfloat16, or "auto" for the folder's own (bfloat16 for float16).

    Raises:
        UnsupportedModelError: Architecture, feature or data type that is not supported.
        FileNotFoundError: The folder has no config.json.
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; expected a Hugging Face folder")
    try:
        hf = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"cannot read {folder}/config.json: {error}") from error
    _refuse_unsupported(hf)
    family, attention_bias = FAMILIES[hf.model_type], bool(getattr(hf, "attention_bias", False))
    inv_freq, rope_scaling = rope_frequencies(hf)
    head_dim = _head_dim(hf)
    return DecoderConfig(
        model_type=hf.model_type,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        intermediate=hf.intermediate_size,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
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
        eos_token_ids=_eos(folder, hf),
        bos_token_id=hf.bos_token_id,
        dtype=_dtype(hf, dtype),
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
            "quantised checkpoints are not supported; use a float32 or bfloat16 one"
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
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = hf.rope_parameters.get("rope_type", "default")
    if kind == "default":
        dim = _head_dim(hf)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / hf.rope_parameters["rope_theta"] ** exponents, 1.0
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


def _eos(folder: str | Path, hf: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    found = hf.eos_token_id
    if (Path(folder) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(str(folder))
        found = generation.eos_token_id if generation.eos_token_id is not None else found
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _dtype(hf: Any, requested: torch.dtype | str) -> torch.dtype:
    found = requested
    if requested == "auto":
        found = getattr(hf, "dtype", None) or torch.float32
    if isinstance(found, str):
        found = getattr(torch, found, found)
    if found == torch.float16 and requested == "auto":
        found = torch.bfloat16
    if found not in SUPPORTED_DTYPES:
        raise UnsupportedModelError(
            f"dtype {found!r} is not supported, expected float32 or bfloat16"
        )
    assert isinstance(found, torch.dtype)
    return found
