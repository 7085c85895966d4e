"""A head for multi-token prediction in plain dense PyTorch, for training."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.drafter.methods.mtp.config import MtpConfig
from paceline.train.modules.feedback import FeedbackModel
from paceline.train.modules.layers import Mlp, Projections, RmsNorm


class DenseMtpLayer(nn.Module):
    """The projection of embedding and hidden state, a layer, and the norm before the LM head."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()

        def norm() -> RmsNorm:
            return RmsNorm(config.hidden, config.norm_eps)

        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.input_layernorm = norm()
        self.self_attn = Projections(config, config.hidden, norms=config.qk_norm)
        self.post_attention_layernorm = norm()
        self.mlp = Mlp(config.hidden, config.intermediate)
        self.shared_head = nn.ModuleDict({"norm": norm()})


class MtpModel(FeedbackModel):
    """One head, by the names of DeepSeek-V3 (arXiv 2412.19437, section 2.2)."""

    config: MtpConfig
    reads_final: ClassVar[bool] = True

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({str(config.target_layers): DenseMtpLayer(config)})

    @property
    def layer(self) -> DenseMtpLayer:
        layer = self.layers[str(self.config.target_layers)]
        assert isinstance(layer, DenseMtpLayer)
        return layer

    def fuse(self, states: Tensor) -> Tensor:
        return states

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        x: Tensor = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
        return x, layer.input_layernorm(x)

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.shared_head["norm"](x), x
