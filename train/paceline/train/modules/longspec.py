"""The LongSpec layer in plain dense PyTorch: for training, and as the reference of the fast one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.longspec.config import LongSpecConfig
from paceline.train.modules.layers import (
    DraftModel,
    Mlp,
    Projections,
    RmsNorm,
    apply_rope,
    split_heads,
)


class DenseLongSpecLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward block, each with a norm before it."""

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = Projections(config, config.hidden)
        self.cross_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.cross_attn = Projections(config, config.hidden, own_keys=False)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class LongSpecModel(DraftModel):
    """The layer and its final norm (LongSpec, section 3.1).

    Memory grows with queries times keys.
    """

    config: LongSpecConfig

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([DenseLongSpecLayer(config)])
        self.norm = RmsNorm(config.hidden, config.norm_eps)

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        self_mask: Tensor,
        keys: Tensor,
        values: Tensor,
        cross_mask: Tensor,
    ) -> Tensor:
        """Return hidden states for the target's LM head.

        Args:
            embedded: The target's embedding of the tokens, ``[B, S, hidden]``. The first of them
                are read by self-attention alone if the masks have fewer rows, Q.
            positions: Their positions, int64 ``[B, S]`` or ``[S]``. They need not be consecutive
                (anchor-offset indices, LongSpec, section 3.2), but must be those at which the
                target's keys were rotated.
            self_mask: The S tokens that each attends to, bool ``[B, Q, S]`` or ``[Q, S]``.
            keys: The target layer's keys after RoPE, ``[B, Hkv, T, D]``.
            values: Its values, like ``keys``.
            cross_mask: Target positions that each token attends to, bool ``[B, Q, T]`` or
                ``[Q, T]``.

        Returns:
            ``[B, Q, hidden]`` in the type of ``embedded``. Cross-attention adds 0 to a token that
            attends to no target position.
        """
        config, layer = self.config, self.layers[0]
        assert isinstance(layer, DenseLongSpecLayer)
        factors = self.rope_factors(positions)
        last = slice(embedded.shape[1] - self_mask.shape[-2], None)
        x: Tensor = embedded[:, last]
        inputs = layer.input_layernorm(embedded)
        of_last = factors[0][..., last, :], factors[1][..., last, :]
        q = layer.self_attn.q_proj(inputs[:, last])
        q = apply_rope(split_heads(q, config.head_dim), of_last)
        k = apply_rope(split_heads(layer.self_attn.k_proj(inputs), config.head_dim), factors)
        v = split_heads(layer.self_attn.v_proj(inputs), config.head_dim)
        x = x + layer.self_attn.o_proj(_attend(q, k, v, self_mask))
        inputs = layer.cross_layernorm(x)
        q = apply_rope(split_heads(layer.cross_attn.q_proj(inputs), config.head_dim), of_last)
        x = x + layer.cross_attn.o_proj(_attend(q, keys.to(q), values.to(q), cross_mask))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed: Tensor = self.norm(x)
        return normed


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """``[B, H, S, D]`` over ``[B, Hkv, T, D]`` to ``[B, S, H D]``; 0 for rows without keys."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = (mask if mask.dim() == 3 else mask[None])[:, None]
    empty = ~mask.any(-1, keepdim=True)
    # The softmax of a row without keys is undefined: it gets all keys, and its result is dropped.
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | empty)
    return out.masked_fill(empty, 0.0).transpose(1, 2).flatten(2)
