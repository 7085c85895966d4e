"""The layer over whole texts for training: one attention call per lag instead of masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.layers import apply_rope
from paceline.drafter.methods.longspec import LongSpecModel
from paceline.drafter.methods.longspec.module import Layer, split_heads


class LaggedLayer(nn.Module):
    """Hidden states of a text for several lags at once (flash noisy training, algorithm 2).

    A token attends to target positions at least `lag` before its own. Everything up to and
    including self-attention does not depend on the target and runs once for all lags. Equal to
    :class:`LongSpecModel` with masks, in memory linear in the length.
    """

    def __init__(self, model: LongSpecModel) -> None:
        """Train `model`."""
        super().__init__()
        self.model = model

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        lags: Sequence[int],
        sinks: int,
    ) -> Tensor:
        """Hidden states for the target's LM head.

        Args:
            embedded: The target's embedding of the tokens, `[B, S, hidden]`.
            positions: int64 `[B, S]`.
            keys: The target layer's keys after RoPE at these positions, `[B, Hkv, S, D]`.
            values: Its values, like `keys`.
            lags: Each 1 or more and less than S.
            sinks: Number of tokens at the start that only cross-attention reads: with offset
                positions they are outside the window of self-attention.

        Returns:
            `[lags, B, S, hidden]`; rows below `max(lag, sinks)` are undefined.
        """
        model, layer = self.model, self.model.layers[0]
        assert isinstance(layer, Layer)
        dim, window = model.config.head_dim, model.config.window
        factors = model.rope_factors(positions)
        x: Tensor = embedded
        inputs = layer.input_layernorm(x)
        q = apply_rope(split_heads(layer.self_attn.q_proj(inputs), dim), factors)
        k = apply_rope(split_heads(layer.self_attn.k_proj(inputs), dim), factors)
        v = split_heads(layer.self_attn.v_proj(inputs), dim)
        seen = _windowed(q[:, :, sinks:], k[:, :, sinks:], v[:, :, sinks:], window)
        seen = F.pad(seen, (0, 0, sinks, 0))
        x = x + layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        q = apply_rope(split_heads(layer.cross_attn.q_proj(layer.cross_layernorm(x)), dim), factors)
        found = torch.stack([_lagged(q, keys, values, lag) for lag in lags])
        x = x + layer.cross_attn.o_proj(found.transpose(2, 3).flatten(3))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x if model.norm is None else model.norm(x)


def _lagged(q: Tensor, keys: Tensor, values: Tensor, lag: int) -> Tensor:
    """`[B, H, S, D]` over keys up to `lag` positions earlier; 0 in the first rows."""
    found = attend(q[:, :, lag:], keys[:, :, :-lag].to(q), values[:, :, :-lag].to(q))
    return F.pad(found, (0, 0, lag, 0))


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Each token attends to itself and the `window` - 1 before it."""
    length = q.shape[2]
    if length <= window:
        return attend(q, k, v)
    # Blocks of one window: a query attends to its own block and the one before, under one mask.
    padded = -length % window
    q, k, v = (F.pad(each, (0, 0, 0, padded)) for each in (q, k, v))
    rows = torch.arange(window, device=q.device)[:, None] + window
    columns = torch.arange(2 * window, device=q.device)
    band = (columns <= rows) & (columns > rows - window)
    parts = [attend(q[:, :, :window], k[:, :, :window], v[:, :, :window])]
    for start in range(window, length, window):
        near = slice(start - window, start + window)
        parts.append(attend(q[:, :, start : start + window], k[:, :, near], v[:, :, near], band))
    return torch.cat(parts, dim=2)[:, :, :length]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Grouped-query attention of `[B, H, S, D]` over `[B, Hkv, S, D]`; without a mask, causal."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
