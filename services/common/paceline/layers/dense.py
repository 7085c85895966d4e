"""Parts of a layer in plain dense PyTorch: for training, and to test the fast ones against."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RmsNorm(nn.Module):
    """Root mean square norm, in float32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale * self.weight.float()).to(x.dtype)


class Mlp(nn.Module):
    """Gated feed-forward block without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


def turned(x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of heads ``[..., D]`` by cosines and sines, each ``[..., D / 2]``."""
    cos, sin = factors
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
