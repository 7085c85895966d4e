"""A LongSpec layer under KV budgets: the target's KV becomes sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter.methods.layers import apply_rope
from paceline.drafter.methods.longspec import LongSpecModel
from paceline.drafter.methods.longspec.module import Layer, split_heads
from paceline.kernels import attention_weights
from paceline.train.batches import Batches
from paceline.train.budget.preset import OBSERVED, BudgetPreset
from paceline.train.budget.views import Draw, chosen, full_view, sparse_view
from paceline.train.longspec.lagged import attend
from paceline.train.longspec.target import FrozenTarget


class ContinuedLayer(nn.Module):
    """Hidden states of continuations of one row, for several views of the target at once.

    Everything up to and including self-attention does not depend on the target and runs once.
    Equal to :class:`LongSpecModel` with masks, except that only keys and values
    are computed for the prefix, without gradient.
    """

    def __init__(self, model: LongSpecModel) -> None:
        """Train `model`."""
        super().__init__()
        self.model = model

    def forward(
        self, embedded: Tensor, positions: Tensor, keys: Tensor, values: Tensor, views: Tensor
    ) -> Tensor:
        """Hidden states for the target's LM head.

        Args:
            embedded: The target's embedding of `window - 1` tokens of prefix and C new ones,
                `[B, window - 1 + C, hidden]`.
            positions: Their positions, int64 `[B, window - 1 + C]`.
            keys: The target layer's keys after RoPE of the whole row, `[Hkv, S, D]`.
            values: Its values, like `keys`.
            views: Row positions visible to each new token, bool `[V, B, C, S]`.

        Returns:
            `[V, B, C, hidden]`.
        """
        model, layer = self.model, self.model.layers[0]
        assert isinstance(layer, Layer)
        dim, old = model.config.head_dim, model.config.window - 1
        cos, sin = model.rope_factors(positions)
        new = (cos[:, :, old:], sin[:, :, old:])
        with torch.no_grad():
            before = layer.input_layernorm(embedded[:, :old])
            factors = (cos[:, :, :old], sin[:, :, :old])
            k_old = apply_rope(split_heads(layer.self_attn.k_proj(before), dim), factors)
            v_old = split_heads(layer.self_attn.v_proj(before), dim)
        x: Tensor = embedded[:, old:]
        inputs = layer.input_layernorm(x)
        q = apply_rope(split_heads(layer.self_attn.q_proj(inputs), dim), new)
        k = apply_rope(split_heads(layer.self_attn.k_proj(inputs), dim), new)
        v = split_heads(layer.self_attn.v_proj(inputs), dim)
        band = torch.ones(len(x[0]), old + len(x[0]), dtype=torch.bool, device=x.device)
        band = band.triu().tril(old)
        seen = attend(q, torch.cat([k_old, k], 2), torch.cat([v_old, v], 2), band)
        x = x + layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        q = apply_rope(split_heads(layer.cross_attn.q_proj(layer.cross_layernorm(x)), dim), new)
        # All continuations attend to one row: they are batched as more queries of it.
        rows = q.transpose(0, 1).flatten(1, 2)[None]
        k, v = keys.to(q)[None], values.to(q)[None]
        parts = [
            attend(rows, k, v, view.flatten(0, 1))[0].unflatten(1, (len(q), -1)) for view in views
        ]
        found = torch.stack(parts).transpose(1, 2)
        x = x + layer.cross_attn.o_proj(found.transpose(2, 3).flatten(3))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if model.norm is not None:
            x = model.norm(x)
        return x


class ObservedTarget(FrozenTarget):
    """A target that also returns the attention weights of the layer that a drafter reads."""

    def __init__(self, folder: Path, device: str, layer: int) -> None:
        """Load it; see :class:`~paceline.train.longspec.target.FrozenTarget`."""
        super().__init__(folder, device, layer)
        self._attention: Any = self.model.model.layers[layer].self_attn
        self._inputs: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._attention.register_forward_pre_hook(self._keep_inputs, with_kwargs=True)

    @torch.no_grad()
    def weights(self, begin: int, end: int, keys: Tensor) -> Tensor:
        """Attention weights that positions `begin` to `end` give to each position before `end`.

        They are of the first row of the last call of `read`, summed over queries and heads; `keys`
        are its keys, `[Hkv, S, D]`. Returns fp32 `[end]`.
        """
        if self._inputs is None:
            raise RuntimeError("no row was read yet: call read first")
        hidden, (cos, sin) = self._inputs
        rows, dim = slice(begin, end), keys.shape[-1]
        with torch.autocast(keys.device.type, enabled=False):
            q = self._attention.q_proj(hidden[0, rows]).view(end - begin, -1, dim)
            if hasattr(self._attention, "q_norm"):
                q = self._attention.q_norm(q)
            factors = (cos[0, rows, : dim // 2].float(), sin[0, rows, : dim // 2].float())
            q = apply_rope(q.transpose(0, 1), factors).transpose(0, 1)
        return attention_weights(q, keys[:, :end])

    def _keep_inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs = kwargs["hidden_states"], kwargs["position_embeddings"]


class LayerLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over a LongSpec layer.

    Cross-entropy against the target's greedy choices: with the full prefix visible, plus
    lambda times the same with the part that the budget allows (BudgetDraft, equations 4 to 7).
    """

    def __init__(
        self, target: ObservedTarget, window: int, batches: Batches, preset: BudgetPreset
    ) -> None:
        """`window` is the layer's, in tokens.

        Raises ValueError if the shortest prefix is shorter than the window.
        """
        if preset.shortest_prefix < window:
            raise ValueError(
                f"prefixes begin at {preset.shortest_prefix} tokens, expected at least the layer's "
                f"window of {window}"
            )
        self._target, self._window = target, window
        self._batches, self._preset = batches, preset

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        target, preset, old = self._target, self._preset, self._window - 1
        head = target.head
        tokens = self._batches.stream[indices[:, :-1]].to(head.device)
        hidden, keys, values = target.read(tokens, torch.arange(tokens.shape[1])[None].to(tokens))
        draw, lags = Draw.of(preset), self._draw_lags()
        views = self._views(draw, lags, keys[0]).to(head.device)
        begins = torch.tensor(draw.prefixes)[:, None] - old
        fed = (begins + torch.arange(old + preset.continuation)).to(head.device)
        embedded = target.embed(tokens[0][fed]).float()
        found = forward(embedded, fed, keys[0], values[0], views).to(head)
        greedy = F.linear(hidden[0][fed[:, old:]].to(head), head).argmax(-1)
        logits = F.linear(found, head).float()
        labels = greedy.expand(logits.shape[:-1])
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        by_lag = losses.view(-1, len(lags), greedy.numel()).mean(-1)
        decay = torch.tensor([preset.lag_decay**lag for lag in lags]).to(by_lag)
        by_view = (by_lag * decay).sum(-1) / decay.sum()
        return by_view[0] + preset.sparse_weight * by_view[1:].sum()

    def _views(self, draw: Draw, lags: list[int], keys: Tensor) -> Tensor:
        """The full views of all lags, then the sparse ones, bool `[V, B, C, S]`."""
        length, count = keys.shape[1], self._preset.continuation
        views = [full_view(draw.prefixes, count, length, lag) for lag in lags]
        if self._preset.sparse_weight:
            kept = [self._kept(draw, prefix, keys) for prefix in draw.prefixes]
            views += [sparse_view(view, draw.prefixes, kept) for view in views]
        return torch.stack(views)

    def _kept(self, draw: Draw, prefix: int, keys: Tensor) -> Tensor:
        weights = None
        if draw.policy == "chunk_topk":
            weights = self._target.weights(prefix - OBSERVED, prefix, keys).cpu()
        return chosen(draw.policy, prefix, draw.budget, weights)

    def _draw_lags(self) -> list[int]:
        drawn = torch.randperm(self._preset.levels)[: self._preset.lags]
        return sorted((1 + drawn).tolist())
