"""The EAGLE-3 layer in plain dense PyTorch: for training, and as the reference of the fast one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.eagle3.config import Eagle3Config
from paceline.drafter.methods.layers import (
    DraftModel,
    Mlp,
    Projections,
    RmsNorm,
    apply_rope,
    split_heads,
)

KeysValues = tuple[Tensor, Tensor]
"""Keys after RoPE and values, each ``[B, Hkv, S, D]``."""


class DenseEagle3Layer(nn.Module):
    """Attention and feed-forward block, each with norms before it."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = Projections(config, 2 * config.hidden, norms=config.qk_norm)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class Eagle3Model(DraftModel):
    """Fusion of the target's hidden states, the layer, and the final norm (EAGLE-3, section 3)."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        each = config.states // len(config.taps)
        eps = config.norm_eps
        self.input_norm = RmsNorm(config.states, eps) if config.norm_before_fc else None
        norms = [RmsNorm(each, eps) for _ in config.taps] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.states, config.hidden, bias=False)
        self.layers = nn.ModuleList([DenseEagle3Layer(config)])
        self.norm = RmsNorm(config.hidden, eps)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states of positions, ``[..., states]``, as one each, ``[..., hidden]``."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(p) for norm, p in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(states)
        return fused

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        seen: Tensor,
        past: KeysValues | None = None,
    ) -> tuple[Tensor, Tensor, KeysValues]:
        """Runs the layer over S positions; the last Q of them have outputs.

        Args:
            embedded: The target's embedding of the tokens, ``[B, S, hidden]``.
            hidden: Hidden states of the positions before, like ``embedded``.
            positions: int64 ``[B, S]``.
            seen: Which keys each query attends to, the T earlier ones first, bool
                ``[B, Q, T + S]``.
            past: Keys and values of T earlier positions.

        Returns:
            Hidden states for the LM head ``[B, Q, hidden]``, those that are inputs again, and the
            keys and values of the S positions.
        """
        config, layer = self.config, self.layers[0]
        assert isinstance(layer, DenseEagle3Layer)
        attention, last = layer.self_attn, slice(embedded.shape[1] - seen.shape[1], None)
        normed = layer.hidden_norm(hidden)
        inputs = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        x = (normed if config.norm_before_residual else hidden)[:, last]
        cos, sin = self.rope_factors(positions)
        q = attention.q_norm(split_heads(attention.q_proj(inputs[:, last]), config.head_dim))
        k = attention.k_norm(split_heads(attention.k_proj(inputs), config.head_dim))
        q, k = apply_rope(q, (cos[:, :, last], sin[:, :, last])), apply_rope(k, (cos, sin))
        own = k, split_heads(attention.v_proj(inputs), config.head_dim)
        parts = [own] if past is None else [past, own]
        keys, values = (
            torch.cat(each, dim=2).repeat_interleave(config.group, dim=1)
            for each in zip(*parts, strict=True)
        )
        out = F.scaled_dot_product_attention(q, keys, values, seen[:, None])
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        final: Tensor = self.norm(x)
        return final, final if config.norm_output else x, own
