"""Drafters whose levels read states, in plain dense PyTorch: for training, and as the reference of
the fast ones (:mod:`paceline.drafter.methods.feedback`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.train.modules.layers import DraftModel, apply_rope, split_heads

KeysValues = tuple[Tensor, Tensor]  # keys after RoPE and values, each ``[B, Hkv, S, D]``


class FeedbackModel(DraftModel):
    """A layer over embeddings of tokens and hidden states of the positions before them."""

    config: Any

    # Whether it reads the target's states behind the final norm, not outputs of layers.
    reads_final: ClassVar[bool] = False

    @property
    @abstractmethod
    def layer(self) -> Any:
        """The layer: modules ``self_attn``, ``post_attention_layernorm`` and ``mlp``."""

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states of positions, ``[..., states]``, to ``[..., hidden]``."""

    @abstractmethod
    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream before the layer, and what the projections of its attention
        read; both for embedded tokens and hidden states ``[B, S, hidden]``."""

    @abstractmethod
    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the LM head reads, and what is an input again, of the layer's output."""

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        seen: Tensor,
        past: KeysValues | None = None,
    ) -> tuple[Tensor, Tensor, KeysValues]:
        """Run the layer over S positions; the last Q of them have outputs.

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
        config, layer = self.config, self.layer
        attention, last = layer.self_attn, slice(embedded.shape[1] - seen.shape[1], None)
        x, inputs = self.enter(embedded, hidden)
        x = x[:, last]
        cos, sin = self.rope_factors(positions)
        q = attention.q_norm(split_heads(attention.q_proj(inputs[:, last]), config.head_dim))
        k = attention.k_norm(split_heads(attention.k_proj(inputs), config.head_dim))
        q, k = apply_rope(q, (cos[:, :, last], sin[:, :, last])), apply_rope(k, (cos, sin))
        new = k, split_heads(attention.v_proj(inputs), config.head_dim)
        parts = [new] if past is None else [past, new]
        keys, values = (
            torch.cat(planes, dim=2).repeat_interleave(config.group, dim=1)
            for planes in zip(*parts, strict=True)
        )
        out = F.scaled_dot_product_attention(q, keys, values, seen[:, None])
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        final, again = self.leave(x)
        return final, again, new
