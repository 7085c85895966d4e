"""Configuration of a packed model; its rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline.formats import KV_CACHE_DTYPES
from paceline.kernels import DeltaShape
from paceline.kernels.caches import row_width

_TYPES = ("dtype", "kv_dtype")  # fields that are torch types
_FIRST_ROWS = 4096


class UnsupportedModelError(ValueError):
    """The model folder needs a feature that this decoder does not support."""


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Name a model in the errors of the body."""
    try:
        yield
    except UnsupportedModelError as error:
        if str(path) in str(error):
            raise
        raise UnsupportedModelError(f"{path}: {error}") from error


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
    # Format of the matrices: float32, bfloat16, int8, int4, mxfp4 (experts in 8-bit blocks of the
    # same values, the rest in `dtype`), or gguf, each as in its GGUF file.
    weights: str
    # Rotary embedding of each layer: 0 is the first, 1 is `rope_local`; empty: 0.
    ropes: tuple[int, ...] = ()
    # Inverse frequencies of the second rotary embedding, or one for all pairs.
    rope_local: tuple[float, ...] = ()
    # Inverse frequencies of "longrope" for contexts up to `rope_short_context`.
    rope_short: tuple[float, ...] = ()
    rope_short_context: int = 0  # longest context of `rope_short`; 0: there are no such frequencies
    # Queries at position p are multiplied by 1 + beta log(1 + floor(p / context)); beta 0: by 1.
    query_scale_beta: float = 0.0
    query_scale_context: int = 0
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
    norm_topk_prob: bool = False  # whether their shares are divided by their sum
    # Whether a share is the sigmoid of a score, not its part of the softmax over all.
    sigmoid_shares: bool = False
    share_factor: float = 1.0  # on shares
    min_share_sum: float = 0.0  # what shares are divided by is no smaller
    # Layers without experts in a mixture of experts, or with a block of another width, rising.
    dense_layers: tuple[int, ...] = ()
    dense_intermediate: int = 0  # width of their feed-forward block
    # Width of a block beside the experts, which all rows go through; 0: none.
    shared_intermediate: int = 0
    # Limit of gates and ups in the feed-forward activation of gpt-oss; 0: another activation.
    swiglu_limit: float = 0.0
    gated: bool = False  # outputs of attention are multiplied by gates, which `qkv` has at its end
    # Layers with the gated delta rule, or a short convolution, instead of attention, rising.
    delta_layers: tuple[int, ...] = ()
    # Key heads, value heads, their widths, and taps of the convolution of these layers; see
    # :class:`paceline.kernels.DeltaShape`.
    delta_heads: tuple[int, ...] = ()
    delta_eps: float = 0.0  # epsilon of the norm of their outputs; 0: `norm_eps`
    delta_beta: float = 1.0  # factor on their betas

    # KV heads and width of heads of layers without a window, then of those with one, in tensors;
    # packed layers have `kv_heads` and `head_dim` for all. Empty: tensors have the same.
    stored_heads: tuple[int, ...] = ()
    keys_as_values: bool = False  # values of layers without a window are keys before their norm
    # Layers that read the keys and values of the last layer before them that has its own and is of
    # their kind, with a window or without; rising.
    shared_layers: tuple[int, ...] = ()
    # Width of what each layer has as an input of its own, by the token and its embedding; 0: none.
    layer_input: int = 0

    def layer_heads(self, layer: int) -> tuple[int, int, int]:
        """Return KV heads and width of heads in tensors of a layer, and how many of queries, keys
        and values it projects."""
        if not self.stored_heads:
            return self.kv_heads, self.head_dim, 3
        full = self.windows[layer] is None
        kv, dim = self.stored_heads[2 * (not full) :][:2]
        if layer in self.shared_layers:
            return kv, dim, 1
        return kv, dim, 2 if full and self.keys_as_values else 3

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Windows of the layers with keys and values of their own. Caches, and readers of caches,
        count these alone."""
        without = {*self.delta_layers, *self.shared_layers}
        return tuple(window for layer, window in enumerate(self.windows) if layer not in without)

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values of their own."""
        return len(self.kv_windows)

    def cache_of(self, layer: int) -> int:
        """Return the index of the keys and values in caches that a layer reads, or the index of its
        recurrent states among the layers that have some."""
        if layer in self.delta_layers:
            return self.delta_layers.index(layer)
        if layer in self.shared_layers:
            kinds = [window is None for window in self.kv_windows]
            return len(kinds) - 1 - kinds[::-1].index(self.windows[layer] is None)
        return layer - sum(other < layer for other in (*self.delta_layers, *self.shared_layers))

    @property
    def delta(self) -> DeltaShape | None:
        """Shape of the layers with recurrent states, if there are any."""
        if not self.delta_layers:
            return None
        return DeltaShape(len(self.delta_layers), *self.delta_heads)

    def feed_forward(self, layer: int) -> tuple[int, int]:
        """Return the experts of a layer, 0 without, and the width of one, or of the only block."""
        if layer in self.dense_layers:
            return 0, self.dense_intermediate
        return self.experts, self.intermediate

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def layer_weights(self) -> int:
        """Number of weights in the matrices of all layers, with one expert and without gates."""
        attention = 2 * (self.q_heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.intermediate)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers that have them."""
        row = row_width(self.head_dim, self.kv_dtype) * self.kv_dtype.itemsize
        return 2 * self.kv_layers * self.kv_heads * row

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON can store them."""
        types = {name: str(getattr(self, name)).removeprefix("torch.") for name in _TYPES}
        return {**asdict(self), **types}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_json`."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        types = {name: getattr(torch, fields[name]) for name in _TYPES}
        return cls(**{**fields, **lists, **types})

    def with_kv(self, kv_cache_dtype: str) -> DecoderConfig:
        """Return the configuration with caches of a type of ``KV_CACHE_DTYPES``.

        Raises ``ValueError`` for another type.
        """
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of "
                f"{', '.join(KV_CACHE_DTYPES)}"
            )
        dtype = self.dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)
        return replace(self, kv_dtype=dtype)

    def with_context(self, max_context: int | None) -> DecoderConfig:
        """Return the configuration for texts of ``max_context`` tokens, maybe with another RoPE."""
        if max_context is None or max_context > self.rope_short_context:
            return self
        return replace(self, rope_inv_freq=self.rope_short)


class RopeShape(Protocol):
    """The fields of :class:`paceline.decoder.DecoderConfig` that a table needs."""

    @property
    def rope_inv_freq(self) -> tuple[float, ...]: ...

    @property
    def rope_scaling(self) -> float: ...

    @property
    def max_position(self) -> int: ...


class Rope:
    """The table of a model, or several, extended on demand.

    Angles are float32 as in transformers. Their cosines are taken in float64 and then rounded, so
    that processors with different float32 functions have the same table.
    """

    def __init__(self, config: RopeShape, device: torch.device | str) -> None:
        self._inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
        # Dimensions that are not turned are not scaled either.
        self._scaling = torch.where(self._inv_freq == 0, 1.0, config.rope_scaling).repeat(2)
        if local := getattr(config, "rope_local", ()):
            second = torch.tensor(local, dtype=torch.float32, device=device)
            self._inv_freq = torch.stack([self._inv_freq, second.expand_as(self._inv_freq)])
            self._scaling = torch.stack([self._scaling, torch.ones_like(self._scaling)])[:, None]
            self._inv_freq = self._inv_freq[:, None]
        self._max_position = config.max_position
        self._beta = getattr(config, "query_scale_beta", 0.0)
        self._context = getattr(config, "query_scale_context", 0)
        self._table = self._rows(min(_FIRST_ROWS, config.max_position))

    def table(self, last: int) -> Tensor:
        """Return float32 ``[positions, D]`` up to at least position ``last``: cosines, then sines.

        Several tables are ``[kinds, positions, D]``; the table of scaled queries is the last.
        """
        if last >= self._table.shape[-2]:
            doubled = min(1 << (last + 1).bit_length(), self._max_position)
            self._table = self._rows(max(doubled, last + 1))
        return self._table

    def _rows(self, count: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float32, device=self._inv_freq.device)
        angles = (positions[:, None] * self._inv_freq).double()
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self._scaling)
        if self._beta:
            table = table.view(-1, *table.shape[-2:])
            scale = 1 + self._beta * torch.log1p((positions // self._context).double())
            table = torch.cat([table, table[:1] * scale[:, None]])
        return table.float()
