"""The DSpark drafter in plain dense PyTorch: for training, and as the reference of the fast one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.dspark.heads import ConfidenceHead, MarkovHead
from paceline.drafter.methods.layers import DraftModel, Mlp, RmsNorm, apply_rope


class DSparkAttention(nn.Module):
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
        self._dim, self._group = config.head_dim, config.group

    def keys_values(self, x: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Projects ``[..., hidden]`` to keys after RoPE and values, each ``[..., Hkv, D]``."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._dim)))
        return apply_rope(keys, factors), self.v_proj(x).unflatten(-1, (-1, self._dim))

    def forward(
        self, x: Tensor, factors: Factors, context: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Attends from blocks to their context and to themselves.

        Args:
            x: The blocks of each text, ``[N, Q, hidden]``.
            factors: Cosines and sines of their positions.
            context: Keys and values of the texts, each ``[N, C, Hkv, D]``.
            seen: Which context and which positions of blocks each one attends to, bool
                ``[N, 1, Q, C + Q]``.
        """
        q = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._dim))), factors)
        k, v = (
            torch.cat(parts, dim=1).transpose(1, 2).repeat_interleave(self._group, dim=1)
            for parts in zip(context, self.keys_values(x, factors), strict=True)
        )
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class DSparkLayer(nn.Module):
    """Attention and feed-forward block, each with a norm before it."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = DSparkAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class DSparkModel(DraftModel):
    """Backbone and heads (DSpark, section 3).

    Blocks of one text share its context: all of them are one attention call under a mask.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RmsNorm(config.hidden, config.norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config) for _ in range(config.layers)])
        self.norm = RmsNorm(config.hidden, config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def forward(
        self, embedded: Tensor, anchors: Tensor, taps: Tensor, tap_positions: Tensor
    ) -> Tensor:
        """Runs the backbone over G blocks of each of N texts.

        Args:
            embedded: The target's embedding of anchors and masks, ``[N, G, block, hidden]``.
            anchors: Positions of the anchors, int64 ``[N, G]``.
            taps: Outputs of the tapped layers, side by side, ``[N, C, taps * hidden]``. A block
                attends to those of the window before its anchor.
            tap_positions: Their positions in any order, -1 for padding, int64 ``[N, C]``.

        Returns:
            Hidden states of the positions that predict, ``[N, G, levels, hidden]``.
        """
        config, shape = self.config, embedded.shape
        projected = self.fc(taps)
        context = self.hidden_norm(projected)
        context_factors = self._factors(tap_positions)
        offsets = torch.arange(config.block, device=anchors.device)
        factors = self._factors((anchors[..., None] + offsets).flatten(1))
        seen = self._seen(anchors, tap_positions)
        if config.state_input:
            places = tap_positions[:, None]
            before = (places >= 0) & (places == anchors[:, :, None] - 1)
            embedded = embedded + (before.to(projected) @ projected)[:, :, None]
        x = embedded.flatten(1, 2)
        for layer in self.layers:
            assert isinstance(layer, DSparkLayer)
            attention = layer.self_attn
            context_kv = attention.keys_values(context, context_factors)
            x = x + attention(layer.input_layernorm(x), factors, context_kv, seen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: Tensor = self.norm(x.view(shape)[:, :, config.block - config.levels :])
        return hidden

    def _seen(self, anchors: Tensor, tap_positions: Tensor) -> Tensor:
        """The mask of the attention: the window before an anchor, and the block itself."""
        texts, count = anchors.shape
        block, window = self.config.block, self.config.window
        ends, places = anchors[:, :, None], tap_positions[:, None]
        before = (places >= 0) & (places < ends)
        if window:
            before &= places >= ends - window
        number = torch.arange(count * block, device=anchors.device) // block
        own = (number[:, None] == number).expand(texts, -1, -1)
        return torch.cat([before.repeat_interleave(block, dim=1), own], dim=-1)[:, None]

    def _factors(self, positions: Tensor) -> Factors:
        angles = positions[..., None, None].float() * self.rope_inv_freq
        return angles.cos() * self.config.rope_scaling, angles.sin() * self.config.rope_scaling


Factors = tuple[Tensor, Tensor]
"""Cosines and sines of positions, each ``[..., 1, D / 2]``."""
