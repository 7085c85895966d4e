"""The frozen target whose hidden states, keys and values a drafter is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from paceline.train.model import load_model


class FrozenTarget:
    """A Hugging Face causal language model without gradients.

    It runs in bf16, so its keys and values are those that a verifier serves.
    """

    def __init__(self, folder: Path, device: str, layer: int) -> None:
        """Load it; `layer` is the one whose keys and values a drafter reads."""
        model = load_model(folder, torch.bfloat16)
        self.model = model.to(device).eval().requires_grad_(False)
        self.context: int = model.config.max_position_embeddings
        self._layer = layer

    @property
    def head(self) -> Tensor:
        """LM head [V, hidden], bf16."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embedding [..., hidden], bf16."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    @torch.no_grad()
    def read(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states for the LM head [B, S, hidden], keys and values [B, Hkv, S, D], all bf16.

        `tokens` and `positions` are int64 [B, S]. Attention is causal in the order of the tokens,
        not of their positions.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            cache = DynamicCache()
            # An explicit mask: without it transformers treats a jump in positions as packed texts.
            mask = torch.ones_like(tokens)
            out = self.model.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
            layer: Any = cache.layers[self._layer]
            return out.last_hidden_state, layer.keys, layer.values
