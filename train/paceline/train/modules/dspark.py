"""The DSpark drafter in plain dense PyTorch: for training, and as the reference of the fast one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.dspark.config import DSparkConfig
from paceline.drafter.methods.dspark.heads import ConfidenceHead, MarkovHead
from paceline.kernels.rows import convolve_blocks
from paceline.train.modules.layers import (
    DraftModel,
    Mlp,
    Projections,
    RmsNorm,
    apply_rope,
    split_heads,
)

Factors = tuple[Tensor, Tensor]  # cosines and sines of positions, each ``[N, 1, S, D / 2]``


class DSparkAttention(Projections):
    """Attention of a block to the context and, in both directions, to itself (equation 3)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config, config.hidden, norms=True)
        self._dim, self._group = config.head_dim, config.group

    def keys_values(self, x: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
        """Project ``[N, S, hidden]`` to keys after RoPE and values, each ``[N, Hkv, S, D]``."""
        keys = self.k_norm(split_heads(self.k_proj(x), self._dim))
        return apply_rope(keys, factors), split_heads(self.v_proj(x), self._dim)

    def forward(
        self, x: Tensor, factors: Factors, context: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Attend from blocks to their context and to themselves.

        Args:
            x: The blocks of each text, ``[N, Q, hidden]``.
            factors: Cosines and sines of their positions.
            context: Keys and values of the texts, each ``[N, Hkv, C, D]``.
            seen: Which context and which positions of blocks each one attends to, bool
                ``[N, 1, Q, C + Q]``.
        """
        q = apply_rope(self.q_norm(split_heads(self.q_proj(x), self._dim)), factors)
        k, v = (
            torch.cat(parts, dim=2).repeat_interleave(self._group, dim=1)
            for parts in zip(context, self.keys_values(x, factors), strict=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, seen)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class BlockConv(nn.Module):
    """Causal convolutions over a block, before and after a part of a layer (DFlash 2).

    A weight of a channel is the sum of a fixed one and of one for its group, which depends on the
    input of the part.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        assert config.conv is not None
        size, self._group = config.conv
        self.base_kernel = nn.Parameter(torch.zeros(2, size, config.hidden))
        groups = config.hidden // self._group
        self.kernel_projection = nn.Linear(config.hidden, 2 * size * groups, bias=False)

    def forward(self, x: Tensor, source: Tensor, which: int) -> Tensor:
        """Convolve blocks ``[..., Q, hidden]``.

        Args:
            x: What is convolved: before the part its input, after it its output.
            source: The part's input.
            which: 0 before the part, 1 after it.
        """
        group_weights = self.kernel_projection(source)
        return convolve_blocks(x, self.base_kernel[which], group_weights, which)


class DSparkLayer(nn.Module):
    """Attention and feed-forward block, each with a norm before it."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        conv = config.conv is not None
        self.attention_conv = BlockConv(config) if conv else None
        self.mlp_conv = BlockConv(config) if conv else None
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = DSparkAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class DSparkModel(DraftModel):
    """Backbone and heads (DSpark, section 3).

    Blocks of one text share its context: all of them are one attention call under a mask.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.taps) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RmsNorm(config.hidden, config.norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config) for _ in range(config.layers)])
        self.norm = RmsNorm(config.hidden, config.norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def forward(
        self, embedded: Tensor, anchors: Tensor, taps: Tensor, tap_positions: Tensor
    ) -> Tensor:
        """Run the backbone over G blocks of each of N texts.

        Args:
            embedded: The target's embedding of anchors and masks, ``[N, G, block, hidden]``.
            anchors: Positions of the anchors, int64 ``[N, G]``.
            taps: Outputs of the tapped layers, side by side, ``[N, C, taps * hidden]``. A block
                attends to outputs in the window before its anchor.
            tap_positions: Their positions in any order, -1 for padding, int64 ``[N, C]``.

        Returns:
            Hidden states of the positions that predict, ``[N, G, levels, hidden]``.
        """
        config, shape = self.config, embedded.shape
        projected = self.fc(taps)
        context = self.hidden_norm(projected)
        context_factors = self.rope_factors(tap_positions)
        offsets = torch.arange(config.block, device=anchors.device)
        factors = self.rope_factors((anchors[..., None] + offsets).flatten(1))
        seen = self._seen(anchors, tap_positions)
        if config.state_input:
            places = tap_positions[:, None]
            before = (places >= 0) & (places == anchors[:, :, None] - 1)
            embedded = embedded + (before.to(projected) @ projected)[:, :, None]
        x = embedded.flatten(1, 2) * config.embedding_factor
        for layer, mask in zip(self.layers, seen, strict=True):
            assert isinstance(layer, DSparkLayer)
            attention = layer.self_attn
            context_kv = attention.keys_values(context, context_factors)
            inputs = layer.input_layernorm(x)
            x = x + self._around(layer.attention_conv, attention, inputs, factors, context_kv, mask)
            x = x + self._around(layer.mlp_conv, layer.mlp, layer.post_attention_layernorm(x))
        hidden: Tensor = self.norm(x.view(shape)[:, :, config.block - config.levels :])
        return hidden

    def markov_rows(self, tokens: Tensor) -> Tensor:
        return tokens if self.config.markov_all else self.draft_rows(tokens)

    def _around(
        self, conv: nn.Module | None, part: nn.Module, inputs: Tensor, *more: Any
    ) -> Tensor:
        """Return a part of a layer, between the convolutions that it has."""
        if conv is None:
            plain: Tensor = part(inputs, *more)
            return plain
        shape = (*inputs.shape[:-2], -1, self.config.block, inputs.shape[-1])
        source = inputs.view(shape)
        out = part(conv(source, source, 0).view_as(inputs), *more)
        convolved: Tensor = conv(out.view(shape), source, 1)
        return convolved.view_as(inputs)

    def _seen(self, anchors: Tensor, tap_positions: Tensor) -> list[Tensor]:
        """Return each layer's mask of attention: the window before an anchor, and the block."""
        texts, count = anchors.shape
        block = self.config.block
        number = torch.arange(count * block, device=anchors.device)
        same = number[:, None] // block == number // block
        offsets = number % block
        ends = anchors.repeat_interleave(block, dim=1)[:, :, None]
        places, masks = tap_positions[:, None], dict[tuple[int, bool], Tensor]()
        for window, causal in self.config.attention:
            before = (places >= 0) & (places < ends)
            within = same & (number[:, None] >= number) if causal else same
            if window:
                first = ends - window
                if causal:
                    first = first + offsets[:, None]
                    within = within & (number[:, None] - number <= window)
                before &= places >= first
            mask = torch.cat([before, within.expand(texts, -1, -1)], dim=-1)[:, None]
            masks[window, causal] = mask
        return [masks[kind] for kind in self.config.attention]
