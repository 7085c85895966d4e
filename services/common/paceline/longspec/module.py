"""The LongSpec layer in plain dense PyTorch: for training, and to test the fast one against."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.layers import Mlp, RmsNorm, turned
from paceline.longspec.config import LongSpecConfig


class Attention(nn.Module):
    """Projections of one attention: all four, or those of the query and the output alone."""

    def __init__(self, config: LongSpecConfig, *, own_keys: bool) -> None:
        super().__init__()
        q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q, bias=False)
        if own_keys:
            self.k_proj = nn.Linear(config.hidden, kv, bias=False)
            self.v_proj = nn.Linear(config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden, bias=False)


class Layer(nn.Module):
    """Self-attention, cross-attention and feed-forward block, each behind its norm."""

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config, own_keys=True)
        self.cross_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.cross_attn = Attention(config, own_keys=False)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class LongSpecModel(nn.Module):
    """The layer and its final norm (LongSpec, section 3.1); no embedding and no LM head.

    Parameters have the names of the folder's tensors. Everything is computed densely, so memory
    grows with queries times keys.
    """

    rope_inv_freq: Tensor

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = RmsNorm(config.hidden, config.norm_eps) if config.final_norm else None
        # Not in the state dict: it is the target's, and the folder's config.json says it.
        self.register_buffer("rope_inv_freq", torch.tensor(config.rope_inv_freq), persistent=False)

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        self_mask: Tensor,
        keys: Tensor,
        values: Tensor,
        cross_mask: Tensor,
    ) -> Tensor:
        """Hidden states for the target's LM head.

        Args:
            embedded: The target's embedding of the tokens, ``[B, S, hidden]``.
            positions: Their positions, int64 ``[B, S]`` or ``[S]``. They need not be consecutive
                (anchor-offset indices, LongSpec, section 3.2), but must be those at which the
                target's keys were rotated.
            self_mask: Which of the S tokens each sees, bool ``[B, S, S]`` or ``[S, S]``; true: it
                does.
            keys: The target layer's keys after RoPE, ``[B, Hkv, T, D]``.
            values: Its values, like ``keys``.
            cross_mask: Which target positions each token sees, bool ``[B, S, T]`` or ``[S, T]``.

        Returns:
            ``[B, S, hidden]`` in the type of ``embedded``. A token that sees no target position
            gets nothing from cross-attention.
        """
        config, layer = self.config, self.layers[0]
        assert isinstance(layer, Layer)
        factors = self.rope_factors(positions)
        x: Tensor = embedded
        inputs = layer.input_layernorm(x)
        q = turned(split_heads(layer.self_attn.q_proj(inputs), config.head_dim), factors)
        k = turned(split_heads(layer.self_attn.k_proj(inputs), config.head_dim), factors)
        v = split_heads(layer.self_attn.v_proj(inputs), config.head_dim)
        x = x + layer.self_attn.o_proj(_attend(q, k, v, self_mask))
        inputs = layer.cross_layernorm(x)
        q = turned(split_heads(layer.cross_attn.q_proj(inputs), config.head_dim), factors)
        x = x + layer.cross_attn.o_proj(_attend(q, keys.to(q), values.to(q), cross_mask))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if self.norm is not None:
            x = self.norm(x)
        return x

    def rope_factors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.rope_inv_freq
        if angles.dim() == 2:
            angles = angles[None]
        scaling = self.config.rope_scaling
        return (angles.cos() * scaling)[:, None], (angles.sin() * scaling)[:, None]


def split_heads(x: Tensor, dim: int) -> Tensor:
    """``[B, S, H D]`` to ``[B, H, S, D]``."""
    return x.view(*x.shape[:2], -1, dim).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """``[B, H, S, D]`` over ``[B, Hkv, T, D]`` to ``[B, S, H D]``; rows that see nothing get 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = (mask if mask.dim() == 3 else mask[None])[:, None]
    blind = ~mask.any(-1, keepdim=True)
    # A row without keys has no softmax: it looks at all of them, and what it sees is dropped.
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind)
    return out.masked_fill(blind, 0.0).transpose(1, 2).flatten(2)
