"""Training of a LongSpec layer (LongSpec, sections 3.2 and D)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from paceline.convert import ModelSource
from paceline.convert.weights import Checkpoint
from paceline.decoder import Decoder
from paceline.drafter.methods.checkpoint import read_shape
from paceline.drafter.methods.longspec import LongSpecConfig
from paceline.kernels import SINKS
from paceline.train.batches import PADDING, Batches, Prefixes, RowStream
from paceline.train.conversations import OwnTexts
from paceline.train.corpus import Corpus, encode_all, load_tokenizer
from paceline.train.drafters import (
    DrafterModel,
    Heldout,
    Objective,
    Rounds,
    parameters,
    trained_levels,
    write_after,
)
from paceline.train.loop import Loss
from paceline.train.model import load_model
from paceline.train.modules import LongSpecModel
from paceline.train.modules.layers import apply_rope, split_heads
from paceline.train.modules.longspec import DenseLongSpecLayer
from paceline.train.presets import Plan
from paceline.train.recipes.longspec import LongSpecPreset
from paceline.train.run import Run
from paceline.train.signals import Signals
from paceline.train.trainer import LayerTrainer

CHUNK = 256  # text positions whose logits exist at once, for every lag
TAIL = 512  # tokens of a text whose distributions are learnt in a step: the last ones
_WIDTHS, _MAX_NODES = "12,16", 36  # nodes per level of the measured trees; the last holds on
_TREES = {"widths": "4,4", "max_nodes": "7", "weights": "int8"}
_LONG_PROMPTS, _LONG_TEXTS = (1_000, 2_000, 4_000, 7_000), 8
_CONTEXTS = {
    "whole context": {**_TREES, "context": "0"},
    "512 positions": {**_TREES, "context": "512"},
}


class LaggedLayer(nn.Module):
    """Hidden states of a text for several lags at once (flash noisy training, algorithm 2).

    A token attends to target positions at least `lag` before its own. Everything up to and
    including self-attention does not depend on the target and runs once for all lags. Equal to
    :class:`LongSpecModel` with masks, in memory linear in the length.
    """

    def __init__(self, model: LongSpecModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        embedded: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        lags: Sequence[int],
        sinks: int,
    ) -> Tensor:
        """Return hidden states for the target's LM head.

        Args:
            keys: The target layer's keys after RoPE at these positions, `[B, Hkv, S, D]`.
            sinks: Number of tokens at the start that only cross-attention reads: with offset
                positions they are outside the window of self-attention.

        Returns:
            `[lags, B, S, hidden]`; rows below `max(lag, sinks)` are undefined.
        """
        model, layer = self.model, self.model.layers[0]
        assert isinstance(layer, DenseLongSpecLayer)
        dim, window = model.config.head_dim, model.config.window
        factors = model.rope_factors(positions)
        x: Tensor = embedded
        inputs = layer.input_layernorm(x)
        q = apply_rope(split_heads(layer.self_attn.q_proj(inputs), dim), factors)
        k = apply_rope(split_heads(layer.self_attn.k_proj(inputs), dim), factors)
        v = split_heads(layer.self_attn.v_proj(inputs), dim)
        seen = _windowed(q[:, :, sinks:], k[:, :, sinks:], v[:, :, sinks:], window)
        seen = F.pad(seen, (0, 0, sinks, 0))
        x = x + layer.self_attn.o_proj(seen.transpose(1, 2).flatten(2))
        q = apply_rope(split_heads(layer.cross_attn.q_proj(layer.cross_layernorm(x)), dim), factors)
        attended = torch.stack([_lagged(q, keys, values, lag) for lag in lags])
        x = x + layer.cross_attn.o_proj(attended.transpose(2, 3).flatten(3))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed: Tensor = model.norm(x)
        return normed


def _lagged(q: Tensor, keys: Tensor, values: Tensor, lag: int) -> Tensor:
    """`[B, H, S, D]` over keys up to `lag` positions earlier; 0 in the first rows."""
    attended = attend(q[:, :, lag:], keys[:, :, :-lag].to(q), values[:, :, :-lag].to(q))
    return F.pad(attended, (0, 0, lag, 0))


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Each token attends to itself and the `window` - 1 before it."""
    length = q.shape[2]
    if length <= window:
        return attend(q, k, v)
    # Blocks of one window: a query attends to its own block and the one before, under one mask.
    padded = -length % window
    q, k, v = (F.pad(x, (0, 0, 0, padded)) for x in (q, k, v))
    rows = torch.arange(window, device=q.device)[:, None] + window
    columns = torch.arange(2 * window, device=q.device)
    band = (columns <= rows) & (columns > rows - window)
    parts = [attend(q[:, :, :window], k[:, :, :window], v[:, :, :window])]
    for start in range(window, length, window):
        near = slice(start - window, start + window)
        parts.append(attend(q[:, :, start : start + window], k[:, :, near], v[:, :, near], band))
    return torch.cat(parts, dim=2)[:, :, :length]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with grouped queries `[B, H, S, D]` over `[B, Hkv, S, D]`; without a mask, causal."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class LaggedLoss:
    """The :data:`~paceline.train.loop.Loss` of a run.

    Offsets and lags are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self, target: FrozenTarget, batches: Batches, preset: LongSpecPreset, plan: Plan
    ) -> None:
        self._target, self._batches, self._preset, self._plan = target, batches, preset, plan

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        target, preset = self._target, self._preset
        stage, _ = self._plan.stage(done)
        head = target.head
        tokens = self._batches.stream[indices[:, :-1]].to(head.device)
        rows, length = tokens.shape
        shifted = stage.offset and preset.offset
        if shifted:
            positions = offset_positions(rows, length, target.context).to(head.device)
        else:
            positions = torch.arange(length, device=head.device).expand(rows, length)
        hidden, keys, values = target.read(tokens, positions)
        lags = draw_lags(preset)
        sinks = SINKS if shifted else 0
        outputs = forward(target.embed(tokens).float(), positions, keys, values, lags, sinks)
        counted = torch.arange(length).expand(rows, length) >= sinks
        weights = lag_weights(lags, counted, preset).to(head.device)
        return divergence(outputs.flatten(1, 2), hidden.flatten(0, 1), head, weights)


def draw_lags(preset: LongSpecPreset) -> list[int]:
    """Return the lags of a step, rising, from torch's global generator."""
    trained = preset.trained_lags
    drawn = torch.randperm(len(trained))[: preset.lags]
    return sorted(trained[i] for i in drawn.tolist())


def lag_weights(lags: Sequence[int], counted: Tensor, preset: LongSpecPreset) -> Tensor:
    """Return the weights of tokens, fp32 [lags, rows * length], that add up to 1.

    They are 0 where `counted` [rows, length] is false, and where no position of the target is seen.
    """
    weights = torch.zeros(len(lags), *counted.shape)
    for number, lag in enumerate(lags):
        weights[number, :, lag:] = counted[:, lag:] * preset.lag_decay ** (lag - 1)
    return (weights / weights.sum()).flatten(1)


def offset_positions(rows: int, length: int, context: int) -> Tensor:
    """Return anchor-offset indices of short texts (LongSpec, section 3.2 and algorithm 1).

    The first four positions are 0 to 3. The others are consecutive from a random offset on, drawn
    for each row from torch's global generator, so that the last is at most `context` - 1.

    Returns int64 [rows, length]. Raises ValueError if `length` exceeds `context`.
    """
    if length > context:
        raise ValueError(f"a row of {length} tokens does not fit a context of {context}")
    positions = torch.arange(length).repeat(rows, 1)
    offsets = torch.randint(0, context - length + 1, (rows, 1))
    positions[:, SINKS:] += offsets
    return positions


class ChunkedDivergence(torch.autograd.Function):
    """KL divergence of a drafter from the target, both given before the LM head.

    Cross-entropy (LongSpec, appendix D) with the target's distribution as label, minus the entropy
    of that distribution. Logits exist for `CHUNK` positions at a time; the gradient is computed in
    the forward pass, as in Liger's fused linear cross-entropy, so backward needs no logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, head: Tensor, weights: Tensor) -> Tensor:
        """`hidden` [lags, N, d], `target` [N, d], `head` [V, d], `weights` fp32 [lags, N] that add
        up to 1 -> fp32 scalar: the weighted mean in nats."""
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            target_log = F.linear(target[part].to(head), head).float().log_softmax(-1)
            # Rows of the head, averaged by the target's probabilities: the same for every lag.
            mean = target_log.exp().to(head) @ head
            entropy = -(target_log.exp() * target_log).sum(-1)
            rows = hidden[:, part].to(head)
            logits = F.linear(rows.flatten(0, 1), head).float()  # one product for all lags
            draft_log = logits.log_softmax(-1)
            log_sum_exp = (logits[:, 0] - draft_log[:, 0]).view(rows.shape[:2])
            expected_logit = (rows.float() * mean.float()).sum(-1)
            weight = weights[:, part]
            total += ((log_sum_exp - expected_logit - entropy) * weight).sum()
            slope = (draft_log.exp_().to(head) @ head).view_as(rows) - mean
            gradient[:, part] = (slope * weight[..., None]).to(gradient)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None


def divergence(hidden: Tensor, target: Tensor, head: Tensor, weights: Tensor) -> Tensor:
    value: Tensor = ChunkedDivergence.apply(hidden, target, head, weights)  # type: ignore[no-untyped-call]
    return value


class SignalLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over texts up to some place.

    KL divergence between the distributions over the drafted tokens at the last tokens of a text.
    Cross-attention reads the whole text, self-attention the window. Each token has a lag of its
    own, drawn by the weights of the lags (flash noisy training, algorithm 2). A position counts if
    its next token is a drafted one (EAGLE-3 trains likewise).

    With contexts, each token has one of its own too: it sees so many positions before its anchor,
    as `streaming` selects them.

    With anchor-offset indices, the keys behind the first ones are rotated to the new positions. The
    target's distributions stay as for the text without an offset.
    """

    def __init__(
        self, model: LongSpecModel, vocabulary: Tensor, head: Tensor, signals: Signals,
        preset: LongSpecPreset, plan: Plan,
    ) -> None:  # fmt: skip
        """Train `model`; `vocabulary` and `head` are the target's embedding and LM head."""
        self._model, self._embedding, self._head = model, vocabulary, model.draft_head(head)
        self._signals, self._preset, self._plan = signals, preset, plan
        self._lags = torch.tensor([preset.lag_decay ** (lag - 1) for lag in preset.trained_lags])
        contexts = preset.context_weights
        self._contexts = torch.tensor([size or model.config.max_position for size in contexts])
        self._context_weights = torch.tensor([*contexts.values()])
        drafted = torch.zeros(len(vocabulary), dtype=torch.bool)
        drafted[slice(None) if model.d2t is None else model.d2t] = True
        self._counts = drafted[signals.tokens].roll(-1)
        self._counts[torch.tensor(signals.starts[1:]) - 1] = False  # no next token

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        signals, config = self._signals, self._model.config
        rows, length = indices.shape
        real = indices != PADDING
        indices = indices.clamp(min=0)
        places = real.cumsum(1) - 1  # rows end together
        shifted = self._plan.stage(done)[0].offset and self._preset.offset
        sinks = SINKS if shifted else 0
        offsets = torch.zeros(rows, 1, dtype=torch.int64)
        if shifted:
            spare = config.max_position - real.sum(1, keepdim=True)
            offsets = (torch.rand(rows, 1) * (spare + 1)).long()
        positions = (places + offsets * (places >= sinks)).clamp(min=0)
        assert signals.kv is not None
        keys, values = signals.kv[indices].permute(2, 0, 3, 1, 4).float()
        if shifted:
            turned = apply_rope(keys, self._model.rope_factors(offsets * (places >= sinks)))
            keys = turned / config.rope_scaling  # which the keys have already
        last, near = slice(-TAIL, None), slice(-TAIL - config.window, None)
        columns = torch.arange(length)
        apart = columns[last, None] - columns[near]
        usable = real & (places >= sinks)
        near_mask = (apart >= 0) & (apart < config.window) & usable[:, None, near]
        drawn = torch.multinomial(self._lags, rows * len(apart), replacement=True)
        lags = 1 + drawn.view(rows, -1, 1)
        newest = columns[last, None] - lags
        far_mask = (columns <= newest) & real[:, None]
        if self._preset.contexts:
            drawn = torch.multinomial(self._context_weights, lags.numel(), replacement=True)
            contexts = self._contexts[drawn].view_as(lags)
            far_mask &= (columns > newest - contexts + SINKS) | (places < SINKS)[:, None]
        outputs = forward(
            self._embedding[signals.tokens[indices[:, near]]].float(), positions[:, near],
            near_mask, keys, values, far_mask,
        )  # fmt: skip
        counted = (usable & self._counts[indices])[:, last] & (places[:, last] >= lags[..., 0])
        weights = (counted / counted.sum()).flatten()[None]
        hidden = signals.hidden[indices[:, last]].flatten(0, 1)
        return divergence(outputs.flatten(0, 1)[None], hidden, self._head, weights)


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
        """Return the token embedding [..., hidden], bf16."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    @torch.no_grad()
    def read(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states for the head [B, S, hidden], keys and values [B, Hkv, S, D], bf16.

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


@dataclass
class LongSpecDrafterModel(DrafterModel):
    method = "longspec"
    model: LongSpecModel

    @property
    def config(self) -> LongSpecConfig:
        return self.model.config


class LongSpecTrainer(LayerTrainer[LongSpecPreset, LongSpecDrafterModel]):
    method = "longspec"
    prompts = (300, 1024, 2048, 3840)
    trees = _TREES

    def new_drafter(self, end: int) -> LongSpecDrafterModel:
        preset = self.preset
        config = LongSpecConfig.for_target(
            self.target,
            window=preset.window,
            intermediate=preset.intermediate,
            draft_vocab_size=preset.draft_vocab_size,
        )
        return LongSpecDrafterModel(self.target, LongSpecModel(config), preset.levels)

    def read(self, folder: Path, device: str) -> LongSpecDrafterModel:
        config, _ = read_shape(LongSpecConfig, folder)
        model = LongSpecModel(config)
        model.load_state_dict(dict(Checkpoint(folder, torch.float32)))
        return LongSpecDrafterModel(self.target, model.to(device), trained_levels(folder))

    def plan(self, run: Run, focus: int = 0) -> Plan:
        return Plan(self.preset.stages, run.minutes, run.steps, focus)

    def text_loss(
        self,
        drafter: LongSpecDrafterModel,
        batches: Batches,
        plan: Plan,
        separator: int,
        device: str,
    ) -> tuple[nn.Module, Loss]:
        target = FrozenTarget(self.target, device, drafter.config.target_layer)
        preset = replace(self.preset, levels=drafter.levels)
        return LaggedLayer(drafter.model), LaggedLoss(target, batches, preset, plan)

    @property
    def options(self) -> Mapping[str, str]:
        depth = str(self.preset.levels)
        return {"widths": _WIDTHS, "depth": depth, "max_nodes": str(_MAX_NODES)}

    def initial_weights(
        self, source: ModelSource, drafter: LongSpecDrafterModel
    ) -> dict[str, Tensor]:
        """Return the weights of the target's first and last layer, by the names of a LongSpecModel.

        Self-attention reads embeddings, as the target's first layer does; queries of the target
        layer that is read fit its keys.
        """
        config = drafter.config
        first, read = "model.layers.0.", f"model.layers.{config.target_layer}."
        names = {
            "input_layernorm": first + "input_layernorm",
            **{f"self_attn.{n}_proj": f"{first}self_attn.{n}_proj" for n in "qkvo"},
            "cross_layernorm": read + "input_layernorm",
            **{f"cross_attn.{n}_proj": f"{read}self_attn.{n}_proj" for n in "qo"},
            "post_attention_layernorm": read + "post_attention_layernorm",
            **{f"mlp.{n}_proj": f"{read}mlp.{n}_proj" for n in ("gate", "up", "down")},
        }
        weights = {f"layers.0.{key}.weight": f"{name}.weight" for key, name in names.items()}
        weights["norm.weight"] = "model.norm.weight"
        return {key: source.tensor(name, torch.float32, "cpu") for key, name in weights.items()}

    def needed_signals(self, drafter: LongSpecDrafterModel) -> dict[str, Any]:
        return {"kv_layer": drafter.config.target_layer}

    def signal_loss(
        self, drafter: LongSpecDrafterModel, embedding: Tensor, head: Tensor, signals: Signals,
        texts: OwnTexts, plan: Plan,
    ) -> tuple[nn.Module, Loss, RowStream]:  # fmt: skip
        loss = SignalLoss(drafter.model, embedding, head, signals, self.preset, plan)
        return (
            drafter.model,
            loss,
            Prefixes(signals.starts, TAIL, max_length=self.preset.max_length),
        )

    def long_rounds(
        self, drafter: LongSpecDrafterModel, decoder: Decoder, corpus: Corpus, out: Path
    ) -> Rounds:
        """After long held-out documents, with and without the positions in the middle."""
        documents = encode_all(load_tokenizer(self.target), corpus.heldout)
        texts = {
            f"document of {length:,}": write_after(decoder, documents, length, 0.0, _LONG_TEXTS)
            for length in _LONG_PROMPTS
        }
        return Heldout(drafter, decoder, texts, _CONTEXTS).measure(out)

    def shape_section(self, drafter: LongSpecDrafterModel) -> str:
        config, levels = drafter.config, drafter.levels
        trees = f"{_WIDTHS} nodes by level (the last for all deeper levels), {_MAX_NODES}"
        if self.preset.conversations:
            trees = f"{_TREES['widths']} nodes by level, {_TREES['max_nodes']}"
        return f"""\
- {parameters(drafter.model)}, in 8-bit blocks: one layer of width {config.hidden},
  {config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim}, feed-forward
  {config.intermediate}, window {config.window}
- reads keys and values of target layer {config.target_layer} (0 is the first of
  {config.target_layers}); drafts the {config.drafted:,} most frequent of {config.vocab_size:,}
  tokens; embedding and LM head are the target's and not in this folder
- measured with trees of {levels} levels, {trees} nodes at most"""

    def training_section(self, objective: Objective) -> str:
        preset, lags = self.preset, self.preset.trained_lags
        noise = (
            f"Flash noisy training with lags 1 to {lags[-1]}, {preset.lags} of them in each step, "
            f"each weighted {preset.lag_decay:g} relative to the one before."
            if len(lags) > 1
            else "Without flash noisy training: lag 1 alone."
        )
        start = "The layer begins as a copy of the target's first and last layer.\n"
        contexts = ", ".join(f"{context:,}" if context else "all" for context in preset.contexts)
        noise += f"\nContexts of {contexts} positions." if contexts else ""
        stages = "\n".join(
            f"| {s.name} | {s.share:.0%} | {s.rows} x {s.length} | {s.rate:g} | "
            f"{'anchor-offset' if s.offset and preset.offset else 'plain'} | "
            f"{'own texts' if s.focus or preset.conversations else 'files and own texts'} |"
            for s in preset.stages
        )
        return f"""\
{start if preset.conversations else ""}KL divergence from the target's distribution;
{objective.rates}. {noise}

| stage | share of the time | tokens a step | rate | positions | text |
| --- | --- | --- | --- | --- | --- |
{stages}"""
