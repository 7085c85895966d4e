"""The frozen target whose hidden states a DSpark drafter is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.decoder import Decoder, LocalCache, open_model
from paceline.kernels import CHUNK, TreeSegment, plan_trees


class TappedTarget:
    """A target that returns the hidden states that a verifier of it would export.

    Logits are computed only for the tokens that need them (DSpark, section 5.1).
    """

    def __init__(self, folder: Path, device: str, taps: Sequence[int]) -> None:
        """Load it; `taps` are layers, 0 for the first."""
        source = open_model(folder)
        self.decoder = Decoder.load(source, device=device)
        config = self.decoder.config
        name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        self.head = source.tensor(name, config.dtype, device)
        """LM head `[V, hidden]`."""
        self._taps = tuple(taps)
        self._caches: list[LocalCache] = []

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embedding, fp32 `[..., hidden]`."""
        return self.decoder.embed(tokens.flatten()).unflatten(0, tokens.shape)

    def read(self, tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read texts.

        Args:
            tokens: int64 `[B, S]`.
            indices: Tokens to return logits for, as indices into the flattened texts, int64 `[P]`.

        Returns:
            Outputs of the tapped layers side by side, `[B * S, taps * hidden]`, and logits
            `[P, V]`, both in the target's type.
        """
        texts, length = tokens.shape
        while len(self._caches) < texts:
            self._caches.append(LocalCache(self.decoder.config, self.decoder.device))
        for cache in self._caches:
            cache.truncate(0)
            cache.reserve(length)
        blocks = [
            TreeSegment(text, start, None, min(CHUNK, length - start))
            for text in range(texts)
            for start in range(0, length, CHUNK)
        ]
        with torch.autocast(tokens.device.type, enabled=False):
            result = self.decoder.forward(
                tokens.flatten(),
                plan_trees(blocks, device=self.decoder.device),
                self._caches[:texts],
                logit_rows=indices,
                taps=self._taps,
            )
        return torch.cat(result.taps, dim=-1), result.logits
