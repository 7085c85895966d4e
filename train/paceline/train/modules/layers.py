"""Parts of drafters in plain dense PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.convert.drafters import DRAFT_TOKENS
from paceline.drafter.methods.layers import LayerShape, draft_rows


class DraftModel(nn.Module):
    """A drafter's layers in training, without embedding and LM head, which are the target's.

    Parameters have the names of the folder's tensors.
    """

    config: LayerShape  # shape of the layers
    # The target's id of each drafted token, rising, int64 `[R]`; None: all tokens.
    d2t: Tensor | None
    rope_inv_freq: Tensor  # inverse frequencies of the rotary embedding

    def __init__(self, config: LayerShape) -> None:
        super().__init__()
        self.config = config
        count = config.draft_vocab_size
        # On the meta device this would import sympy.
        tokens = torch.arange(count, device="cpu") if count else None
        self.register_buffer(DRAFT_TOKENS, tokens)
        # Not in the state dict: config.json contains it.
        self.register_buffer("rope_inv_freq", torch.tensor(config.rope_inv_freq), persistent=False)

    def draft_head(self, head: Tensor) -> Tensor:
        """Return the rows of the target's LM head ``[V, hidden]`` whose tokens are drafted."""
        return head if self.d2t is None else head[self.d2t]

    def draft_rows(self, tokens: Tensor) -> Tensor:
        """See :func:`~paceline.drafter.methods.layers.draft_rows`."""
        return draft_rows(self.d2t, tokens)

    def rope_factors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions ``[..., S]``, each ``[..., 1, S, D / 2]``."""
        angles = positions[..., None, :, None].float() * self.rope_inv_freq
        return angles.cos() * self.config.rope_scaling, angles.sin() * self.config.rope_scaling


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


class Projections(nn.Module):
    """Projections of an attention: all four, or only query and output.

    Inputs have a width of ``inputs``. With ``norms``, heads of queries and keys are normalised.
    """

    def __init__(
        self, config: LayerShape, inputs: int, *, own_keys: bool = True, norms: bool = False
    ) -> None:
        super().__init__()
        q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, q, bias=False)
        if own_keys:
            self.k_proj = nn.Linear(inputs, kv, bias=False)
            self.v_proj = nn.Linear(inputs, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.norm_eps) if norms else nn.Identity()
        self.k_norm = RmsNorm(config.head_dim, config.norm_eps) if norms else nn.Identity()


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


def apply_rope(x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads ``[..., D]`` by cosines and sines, each ``[..., D / 2]``."""
    cos, sin = factors
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def split_heads(x: Tensor, dim: int) -> Tensor:
    """Reshape ``[B, S, H D]`` to ``[B, H, S, D]``."""
    heads: Tensor = x.unflatten(-1, (-1, dim))
    return heads.transpose(1, 2)
