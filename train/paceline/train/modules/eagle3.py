"""The EAGLE-3 layer in plain dense PyTorch: for training, and as the reference of the fast one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.drafter.methods.eagle3.config import Eagle3Config
from paceline.train.modules.feedback import FeedbackModel
from paceline.train.modules.layers import Mlp, Projections, RmsNorm


class DenseEagle3Layer(nn.Module):
    """Attention and feed-forward block, each with norms before it."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RmsNorm(config.hidden, config.norm_eps)
        self.self_attn = Projections(config, 2 * config.hidden, norms=config.qk_norm)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)


class Eagle3Model(FeedbackModel):
    """Fusion of the target's hidden states, the layer, and the final norm (EAGLE-3, section 3)."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width = config.states // len(config.taps)
        eps = config.norm_eps
        self.input_norm = RmsNorm(config.states, eps) if config.norm_before_fc else None
        norms = [RmsNorm(width, eps) for _ in config.taps] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(config.states, config.hidden, bias=False)
        self.layers = nn.ModuleList([DenseEagle3Layer(config)])
        self.norm = RmsNorm(config.hidden, eps)

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse the target's states of positions, ``[..., states]``, to ``[..., hidden]``."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(p) for norm, p in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(states)
        return fused

    @property
    def layer(self) -> DenseEagle3Layer:
        layer = self.layers[0]
        assert isinstance(layer, DenseEagle3Layer)
        return layer

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.layer.hidden_norm(hidden)
        inputs = torch.cat([self.layer.input_layernorm(embedded), normed], dim=-1)
        return normed if self.config.norm_before_residual else hidden, inputs

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        final: Tensor = self.norm(x)
        return final, final if self.config.norm_output else x
