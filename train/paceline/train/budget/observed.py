"""The frozen target, and what its newest tokens look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafter.methods.layers import apply_rope
from paceline.kernels import attention_weights
from paceline.train.longspec.target import FrozenTarget


class ObservedTarget(FrozenTarget):
    """Remembers the queries of the layer that a drafter reads: they choose chunks of a prefix."""

    def __init__(self, folder: Path, device: str, layer: int) -> None:
        """Load it; see :class:`~paceline.train.longspec.target.FrozenTarget`."""
        super().__init__(folder, device, layer)
        self._attention: Any = self.model.model.layers[layer].self_attn
        self._inputs: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._attention.register_forward_pre_hook(self._look, with_kwargs=True)

    @torch.no_grad()
    def weights(self, begin: int, end: int, keys: Tensor) -> Tensor:
        """How much attention each of the first `end` positions gets from those from `begin` on.

        Of the first row last read, summed over heads; `keys` are its keys, `[Hkv, S, D]`. Returns
        fp32 `[end]`.
        """
        if self._inputs is None:
            raise RuntimeError("nothing was read yet; call read first")
        hidden, (cos, sin) = self._inputs
        rows, dim = slice(begin, end), keys.shape[-1]
        with torch.autocast(keys.device.type, enabled=False):
            q = self._attention.q_proj(hidden[0, rows]).view(end - begin, -1, dim)
            if hasattr(self._attention, "q_norm"):
                q = self._attention.q_norm(q)
            factors = (cos[0, rows, : dim // 2].float(), sin[0, rows, : dim // 2].float())
            q = apply_rope(q.transpose(0, 1), factors).transpose(0, 1)
        return attention_weights(q, keys[:, :end])

    def _look(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = kwargs["hidden_states"], kwargs["position_embeddings"]
