"""The DSpark drafter in plain dense PyTorch: for training, and as the reference of the fast one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.dspark.heads import ConfidenceHead, MarkovHead
from paceline.drafter.methods.layers import Mlp, RmsNorm, apply_rope


class Attention(nn.Module):
    """Attention of a block to the context and, in both directions, to itself (equation 3)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.norm_eps)
        self._dim, self._kv_heads = config.head_dim, config.kv_heads

    def keys_values(self, x: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Projects ``[..., hidden]`` to keys after RoPE and values, each ``[..., Hkv, D]``."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._dim)))
        return apply_rope(keys, factors), self.v_proj(x).unflatten(-1, (-1, self._dim))

    def forward(
        self, x: Tensor, factors: Factors, context: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Attends from blocks to their contexts and to themselves.

        Args:
            x: Blocks, ``[N, block, hidden]``.
            factors: Cosines and sines of their positions.
            context: Keys and values of the context, each ``[U, Hkv, D]``.
            seen: Rows of the context that each block attends to, -1 for none, ``[N, C]``.
        """
        blocks, length, _ = x.shape
        q = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._dim))), factors)
        own = self.keys_values(x, factors)
        rows = seen.clamp(min=0)
        k, v = (
            torch.cat([F.embedding(rows, there.flatten(1)).unflatten(-1, here.shape[2:]), here], 1)
            for there, here in zip(context, own, strict=True)
        )
        # All positions of a block attend to the same keys, so they share one row of the mask.
        q = q.unflatten(2, (self._kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        mask = F.pad(seen >= 0, (0, length), value=True)[:, None, None]
        out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
        out = out.unflatten(2, (length, -1)).permute(0, 2, 1, 3, 4).reshape(blocks, length, -1)
        attended: Tensor = self.o_proj(out)
        return attended


class Layer(nn.Module):
    """Attention and feed-forward block, each with a norm before it."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class DSparkModel(nn.Module):
    """Backbone and heads (DSpark, section 3); no embedding and no LM head.

    Parameters have the names of the folders' tensors. Blocks of any number of texts are packed, and
    indices select each block's context. The cost depends on the blocks and their contexts, not on
    the lengths of the texts (section 5.1, anchor-bounded sequence packing).
    """

    rope_inv_freq: Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RmsNorm(config.hidden, config.norm_eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = RmsNorm(config.hidden, config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        # Not in the state dict: config.json contains it.
        self.register_buffer("rope_inv_freq", torch.tensor(config.rope_inv_freq), persistent=False)

    def forward(
        self,
        embedded: Tensor,
        anchors: Tensor,
        taps: Tensor,
        tap_positions: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """Runs the backbone over blocks.

        Args:
            embedded: The target's embedding of anchor and masks, ``[N, block, hidden]``.
            anchors: Positions of the anchors, int64 ``[N]``.
            taps: Outputs of the tapped layers, side by side, ``[U, taps * hidden]``.
            tap_positions: Position of each row in its text, int64 ``[U]``.
            seen: Rows of ``taps`` that each block attends to, in any order, -1 for none, int64
                ``[N, C]``. Their positions are before the anchor.

        Returns:
            Hidden states of the positions that predict, ``[N, levels, hidden]``.
        """
        config = self.config
        context = self.hidden_norm(self.fc(taps))
        context_factors = self._factors(tap_positions)
        offsets = torch.arange(config.block, device=anchors.device)
        factors = self._factors(anchors[:, None] + offsets)
        x = embedded
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            context_kv = attention.keys_values(context, context_factors)
            x = x + attention(layer.input_layernorm(x), factors, context_kv, seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: Tensor = self.norm(x[:, config.block - config.levels :])
        return hidden

    def _factors(self, positions: Tensor) -> Factors:
        angles = positions[..., None, None].float() * self.rope_inv_freq
        return angles.cos() * self.config.rope_scaling, angles.sin() * self.config.rope_scaling


Factors = tuple[Tensor, Tensor]
"""Cosines and sines of positions, each ``[..., 1, D / 2]``."""
