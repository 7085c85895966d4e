"""A small language model under KV budgets: its own KV becomes sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from paceline.train.batches import Batches
from paceline.train.budget.preset import OBSERVED, BudgetPreset
from paceline.train.budget.views import Draw, chosen, full_view, sparse_view


class ContinuedLm(nn.Module):
    """Logits of continuations of one row, for several views of the row at once."""

    def __init__(self, model: Any) -> None:
        """Train `model`, a Hugging Face causal language model; its attention becomes `eager`, which
        returns its weights and takes any mask."""
        super().__init__()
        model.set_attn_implementation("eager")
        self.model = model

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of a row by layer, each `[1, Hkv, S, D]`, without gradient.

        Also the attention weights of each position from each part of 64 tokens, summed over
        layers and heads: fp32 `[parts, S]`. `tokens` are int64 `[S]`.
        """
        cache: Any = DynamicCache()
        parts = tokens.split(OBSERVED)
        weights = torch.zeros(len(parts), len(tokens))
        for number, part in enumerate(parts):
            out = self.model(
                input_ids=part[None], past_key_values=cache, use_cache=True, output_attentions=True
            )
            for layer in out.attentions:
                weights[number, : layer.shape[-1]] += layer[0].float().sum((0, 1)).cpu()
        return [(layer.keys, layer.values) for layer in cache.layers], weights

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: list[tuple[Tensor, Tensor]], view: Tensor
    ) -> Tensor:
        """Logits `[B, C, V]` of new tokens.

        `tokens` and their `positions` are int64 `[B, C]`, `kv` is the row's as `prefill` gives it,
        and `view`, bool `[B, C, S]`, marks its visible positions. New tokens also attend to earlier
        new tokens.
        """
        rows, count = tokens.shape
        cache: Any = DynamicCache()
        for index, (keys, values) in enumerate(kv):
            cache.update(*(each.expand(rows, -1, -1, -1) for each in (keys, values)), index)
        own = torch.ones(count, count, dtype=torch.bool, device=view.device).tril()
        seen = torch.cat([view, own.expand(rows, -1, -1)], -1)[:, None]
        kind = next(self.model.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=kind, device=view.device)
        mask.masked_fill_(~seen, torch.finfo(kind).min)
        logits: Tensor = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits


class LmLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over a small language model.

    Cross-entropy against the target's greedy choices: with the full prefix visible, plus
    lambda times the same with the part that the budget allows (BudgetDraft, equations 4 to 7).
    """

    def __init__(self, target: Any, model: ContinuedLm, batches: Batches, preset: BudgetPreset):
        """`target` is a Hugging Face causal language model."""
        self._target, self._model = target, model
        self._batches, self._preset = batches, preset

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        preset, device = self._preset, self._target.device
        tokens = self._batches.stream[indices[0, :-1]].to(device)
        draw = Draw.of(preset)
        fed = torch.tensor(draw.prefixes)[:, None] + torch.arange(preset.continuation)
        greedy = self._greedy(tokens, fed.to(device))
        kv, weights = self._model.prefill(tokens)
        # A token's own key is among the new ones, so every view of the row ends with the prefix.
        full = full_view(draw.prefixes, 1, len(tokens), 1).expand(-1, preset.continuation, -1)
        views = [full]
        if preset.sparse_weight:
            kept = [self._kept(draw, prefix, weights) for prefix in draw.prefixes]
            views.append(sparse_view(full, draw.prefixes, kept))
        fed = fed.to(device)
        losses = [
            F.cross_entropy(
                forward(tokens[fed], fed, kv, view.to(device)).float().flatten(0, 1),
                greedy.flatten(),
            )
            for view in views
        ]
        total: Tensor = losses[0] + preset.sparse_weight * sum(losses[1:])
        return total

    @torch.no_grad()
    def _greedy(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """The target's greedy token after each of `indices`, with the full prefix visible."""
        hidden = self._target.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        logits: Tensor = self._target.get_output_embeddings()(hidden[indices])
        return logits.argmax(-1)

    def _kept(self, draw: Draw, prefix: int, weights: Tensor) -> Tensor:
        attention = None
        if draw.policy == "chunk_topk":
            attention = weights[prefix // OBSERVED - 1, :prefix]
        return chosen(draw.policy, prefix, draw.budget, attention)
