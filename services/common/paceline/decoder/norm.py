"""Root mean square norm with few operations and rows that do not depend on one another."""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """``x / rms(x) * weight`` (Zhang and Sennrich 2019), float32 until the last rounding."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """Take a weight whose last dim is the one normalised; results get ``dtype``."""
        self._weight = weight.float()
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self._per_element = 1.0 / weight.shape[-1]
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise float32 ``x`` over its last dim; returns ``x``'s shape."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=self._per_element).rsqrt_()
        scaled = x * scale
        if self._dtype == torch.float32:
            return scaled.mul_(self._weight)
        return torch.mul(scaled, self._weight, out=torch.empty_like(x, dtype=self._dtype))
