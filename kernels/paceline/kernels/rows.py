"""Row-wise operations of a transformer: norms, rotary embedding, gated activation.

Each is one call. All arithmetic is float32, for all types in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad

from paceline.kernels.caches import Plane
from paceline.kernels.rotated import IntSums
from paceline.kernels.trees import TreePlan


@dataclass(frozen=True)
class Norm:
    """Root mean square norm ``x / rms(x) * weight`` (Zhang and Sennrich 2019)."""

    weight: Tensor  # float32 `[width]`
    eps: float  # epsilon, which is added to the mean square


class RowKernels(Protocol):
    """The row operations of a kind of device. M: packed rows; tensors are dense."""

    scale_sums: bool  # whether products may be given before their scales, as `IntSums`

    def add_norm(
        self, x: Tensor, delta: Tensor | IntSums | None, norm: Norm, dtype: torch.dtype
    ) -> Tensor:
        """``x += delta`` in place, then the norm of it, ``[M, width]`` in a type. ``x`` is the
        residual stream, float32 ``[M, width]``, ``delta`` fp32 or bf16, or None to add nothing."""

    def gate(self, gate_up: Tensor | IntSums) -> Tensor:
        """``silu(gate) * up`` for ``[M, 2 width]``, gates first; returns ``[M, width]``."""

    def rotate(
        self,
        heads: Tensor | IntSums,
        norms: tuple[Norm, Norm] | None,
        table: Tensor,
        plan: TreePlan,
        keys: Sequence[Plane],
        values: Sequence[Plane],
    ) -> Tensor:
        """Rotate queries and keys by their positions, and write keys and values to their slots.

        ``heads`` are queries, keys and values, ``[at least M, (Hq + 2 Hkv) D]``; ``norms`` are of
        single query and key heads before the rotation, or None; ``table`` the cosines of every
        angle, then sines, float32 ``[positions, D]``; ``keys`` and ``values`` per sequence a
        layer's cache ``[Hkv, capacity, D]``, or in pages. Returns rotated queries, float32 ``[M,
        Hq, D]``.
        """


def gelu_gate(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` for ``[M, 2 width]``, gates first, with GELU in its form with tanh."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up).to(gate_up.dtype)


def clamped_gate(gate_up: Tensor, limit: float) -> Tensor:
    """``gate * sigmoid(1.702 gate) * (up + 1)`` for ``[M, 2 width]``, gates first, where gates are
    at most ``limit`` and ups within it (gpt-oss)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * (1.702 * gate).sigmoid() * (up + 1)).to(gate_up.dtype)


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """Return the norm of float32 ``[..., width]``."""
    # Not mean(): its order of summation depends on the number of rows. So does this one's on a GPU,
    # whose kernels of their own norm a row by one program.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().mul_(1.0 / x.shape[-1]).add_(norm.eps).rsqrt_()
    scaled: Tensor = x * scale
    return scaled.mul_(norm.weight)


def convolve_blocks(x: Tensor, base: Tensor, group_weights: Tensor, which: int) -> Tensor:
    """Convolve blocks causally, with weights of channels and of positions (DFlash 2).

    ``x`` and the result are ``[..., Q, width]``; ``base`` has weights of the channels, the newest
    position's first, ``[size, width]``; ``group_weights``, ``[..., Q, 2 size groups]``, has those
    of the groups of channels at each position for two convolutions, of which ``which`` is one.
    """
    size, width = base.shape
    weights = group_weights.float().unflatten(-1, (2, size, -1))[..., which, :, :]
    groups = weights.shape[-1]
    wide, out = x.float(), torch.zeros(x.shape, device=x.device)
    for back in range(size):
        moved = wide if not back else pad(wide[..., :-back, :], (0, 0, back, 0))
        channels = weights[..., back, :].repeat_interleave(width // groups, dim=-1)
        out = out + (base[back].float() + channels) * moved
    return out.to(x.dtype)
