"""Training of an EAGLE-3 layer by training-time test (EAGLE-3, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decoder import Decoder, ModelSource, open_model, store_int8
from paceline.drafter.methods.checkpoint import load_weights
from paceline.drafter.methods.eagle3 import Eagle3Config, Eagle3Model, read_eagle3, save_eagle3
from paceline.train.batches import Answers, Batches, Rows
from paceline.train.conversations import OwnTexts
from paceline.train.drafters import LayerDrafterModel, Objective, parameters, trained_levels
from paceline.train.longspec import divergence
from paceline.train.loop import Loss
from paceline.train.presets import CosinePlan, Plan
from paceline.train.recipes.eagle3 import Eagle3Preset
from paceline.train.run import Run
from paceline.train.signals import Signals, TappedTarget
from paceline.train.trainer import LayerTrainer

_FIRST_NORM = 0.25  # of the target's
_EMBEDDING_SCALE = 0.02


@dataclass(frozen=True)
class TrainingRows:
    """B rows of S tokens, the last Q of which predict.

    A column is a token and the target's states of the position before it.
    """

    embedded: Tensor
    """The target's embedding of the tokens, `[B, S, hidden]`."""

    states: Tensor
    """Outputs of the tapped layers, side by side, `[B, S, states]`."""

    positions: Tensor
    """Of the tokens in their texts, rising in each row, int64 `[B, S]`."""

    real: Tensor
    """Which columns are of the row's text, bool `[B, S]`."""

    count: int
    """Q."""


class Unrolled(nn.Module):
    """Outputs of the layer for several depths: those of one are inputs of the next.

    As while drafting, a token at depth d reads the target's states up to d positions before it, and
    behind those the layer's own outputs of the depths before (EAGLE-3, figure 6).
    """

    def __init__(self, model: Eagle3Model) -> None:
        """Train `model`."""
        super().__init__()
        self.model = model

    def forward(self, rows: TrainingRows, depths: int) -> Tensor:
        """Hidden states for the LM head, `[depths, B, Q, hidden]`.

        Of the rows at depth d, counted from 0, the first d are undefined: there is no output to
        read.
        """
        model, last = self.model, slice(-rows.count, None)
        embedded, hidden = rows.embedded, model.fuse(rows.states)
        positions, past, found = rows.positions, None, []
        for depth in range(depths):
            seen = self._seen(rows, depth)
            out, again, own = model(embedded, hidden, positions, seen, past)
            found.append(out)
            past = own if past is None else (_join(past[0], own[0]), _join(past[1], own[1]))
            embedded, positions = rows.embedded[:, last], rows.positions[:, last]
            hidden = F.pad(again[:, :-1], (0, 0, 1, 0))
        return torch.stack(found)

    def _seen(self, rows: TrainingRows, depth: int) -> Tensor:
        """Which keys the tokens at a depth attend to: those of the rows, then of each depth."""
        count, window = rows.count, self.model.config.window
        places = torch.arange(rows.positions.shape[1], device=rows.positions.device)
        apart = places[-count:, None] - places
        text = (apart >= depth) & rows.real[:, None]
        if window:
            text &= apart < window
        if not depth:
            text |= apart == 0  # or a column beyond the text would read nothing
        own = torch.eye(count, dtype=torch.bool, device=places.device)
        # The token j places earlier was read at depth - j.
        later = [
            torch.roll(own, -j, 1).tril() & (not window or j < window)
            for j in reversed(range(depth))
        ]
        return torch.cat([text, *(each.expand(len(text), -1, -1) for each in later)], dim=-1)


def _join(past: Tensor, own: Tensor) -> Tensor:
    return torch.cat([past, own], dim=2)


def depth_weights(counted: Tensor, preset: Eagle3Preset) -> Tensor:
    """Weights of predictions, fp32 `[depths, B * Q]`, that add up to 1.

    They are 0 where `counted` `[B, Q]` is false, and where a depth has nothing to read.
    """
    weights = counted.float().repeat(preset.levels, 1, 1)
    for depth in range(preset.levels):
        weights[depth, :, :depth] = 0
        weights[depth] *= preset.depth_decay**depth
    return (weights / weights.sum()).flatten(1)


class UnrolledLoss:
    """The :data:`~paceline.train.loop.Loss` of a run on texts: KL divergence at every depth."""

    def __init__(
        self, model: Eagle3Model, target: TappedTarget, batches: Batches, preset: Eagle3Preset
    ) -> None:
        self._model, self._target, self._batches = model, target, batches
        self._preset = preset

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        target = self._target
        tokens = self._batches.stream[indices].to(target.head.device)
        count, length = tokens.shape
        states, hidden = (each.view(count, length, -1) for each in target.read(tokens))
        positions = torch.arange(1, length - 1, device=tokens.device).expand(count, -1)
        rows = TrainingRows(
            target.embed(tokens[:, 1:-1]).float(), states[:, :-2].float(), positions,
            torch.ones_like(positions, dtype=torch.bool), length - 2,
        )  # fmt: skip
        found = forward(rows, self._preset.levels)
        counted = self._model.draft_rows(tokens[:, 2:]) < self._model.config.drafted
        weights = depth_weights(counted, self._preset)
        head = self._model.draft_head(target.head.float())
        return divergence(found.flatten(1, 2), hidden[:, 1:-1].flatten(0, 1), head, weights)


class SignalUnrolledLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over answers: KL divergence at every depth.

    Both distributions are over the drafted tokens. A prediction counts if the next token of the
    text is a drafted one, as in the paper.
    """

    def __init__(
        self, model: Eagle3Model, vocabulary: Tensor, head: Tensor, signals: Signals,
        answers: Sequence[int], preset: Eagle3Preset,
    ) -> None:  # fmt: skip
        """Train `model`.

        `vocabulary` and `head` are the target's embedding and LM head; `answers` the indices of the
        first token of each text's answer.
        """
        self._model, self._signals, self._preset = model, signals, preset
        self._embedding, self._head = vocabulary, model.draft_head(head)
        self._starts, self._answers = torch.tensor(signals.starts), torch.tensor(answers)

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        signals, config = self._signals, self._model.config
        # Tokens of the text in columns that begin a window before the answer.
        text = torch.searchsorted(self._starts, indices[:, :1].contiguous(), right=True) - 1
        starts, answers = self._starts[text], self._answers[text]
        ends = indices.amax(1, keepdim=True) + 1
        count = int((ends - answers).amax()) - 1
        before = min(config.window or config.max_position, int((answers - starts).amax()))
        tokens = answers + torch.arange(-before, count)
        real = (tokens > starts) & (tokens < ends - 1)
        tokens = tokens.clamp(1, len(signals.tokens) - 2)
        rows = TrainingRows(
            self._embedding[signals.tokens[tokens]].float(), signals.taps[tokens - 1].float(),
            tokens - starts, real, count,
        )  # fmt: skip
        found = forward(rows, self._preset.levels)
        last = tokens[:, -count:]
        drafted = self._model.draft_rows(signals.tokens[last + 1]) < config.drafted
        weights = depth_weights(drafted & real[:, -count:], self._preset)
        hidden = signals.hidden[last].flatten(0, 1)
        return divergence(found.flatten(1, 2), hidden, self._head, weights)


@dataclass
class Eagle3DrafterModel(LayerDrafterModel):
    """An EAGLE-3 layer."""

    method = "eagle3"
    model: Eagle3Model

    @property
    def config(self) -> Eagle3Config:
        return self.model.config

    @property
    def hidden_state_layers(self) -> Sequence[int]:
        return self.config.taps

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        weights, levels = self.model.state_dict(), self.levels
        save_eagle3(folder, self.config, weights, self.reference, levels=levels, notes=notes)
        store_int8(folder)


class Eagle3Trainer(LayerTrainer[Eagle3Preset, Eagle3DrafterModel]):
    """Trains an EAGLE-3 layer. Its LM head is the target's, frozen."""

    method = "eagle3"
    trees: ClassVar[Mapping[str, str]] = {"widths": "4,4,4", "max_nodes": "8", "weights": "int8"}

    def new_drafter(self, mask_token: int) -> Eagle3DrafterModel:
        preset = self.preset
        config = Eagle3Config.for_target(
            self.target, taps=preset.taps, window=preset.window, fc_norm=preset.fc_norm,
            norm_output=preset.norm_output, draft_vocab_size=preset.draft_vocab_size,
        )  # fmt: skip
        return Eagle3DrafterModel(self.target, Eagle3Model(config), preset.levels)

    def read(self, folder: Path, device: str) -> Eagle3DrafterModel:
        config, _ = read_eagle3(folder)
        model = Eagle3Model(config)
        model.load_state_dict(load_weights(folder, config, Eagle3Model, torch.float32))
        return Eagle3DrafterModel(self.target, model.to(device), trained_levels(folder))

    def plan(self, run: Run, focus: int = 0) -> Plan:
        return CosinePlan(self.preset.stages, run.minutes, run.steps, focus)

    def text_loss(
        self, drafter: Eagle3DrafterModel, batches: Batches, plan: Plan, separator: int, device: str
    ) -> tuple[nn.Module, Loss]:
        decoder = Decoder.load(open_model(self.target), device=device)
        target = TappedTarget(decoder, open_model(self.target), drafter.config.taps)
        preset = replace(self.preset, levels=drafter.levels)
        loss = UnrolledLoss(drafter.model, target, batches, preset)
        return Unrolled(drafter.model), loss

    def initial_weights(
        self, source: ModelSource, drafter: Eagle3DrafterModel, drafted: Tensor
    ) -> dict[str, Tensor]:
        """Weights of the target's last layer, by the names of an Eagle3Model.

        Its projections read the hidden state; those of the embedding are small. The hidden state is
        what that layer reads in the target, as near as a tap is.
        """
        config = drafter.config
        base, own = f"model.layers.{config.target_layers - 1}.", "layers.0."

        def read(name: str) -> Tensor:
            return source.tensor(f"{name}.weight", torch.float32, "cpu")

        weights = {
            f"{own}hidden_norm.weight": read(f"{base}input_layernorm"),
            f"{own}input_layernorm.weight": read("model.layers.0.input_layernorm"),
            "norm.weight": read("model.norm") * _FIRST_NORM,
        }
        same = ["post_attention_layernorm", "self_attn.o_proj"]
        for name in (*same, *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))):
            weights[f"{own}{name}.weight"] = read(base + name)
        for name in ("q", "k", "v"):
            half = read(f"{base}self_attn.{name}_proj")
            small = torch.randn_like(half) * _EMBEDDING_SCALE
            weights[f"{own}self_attn.{name}_proj.weight"] = torch.cat([small, half], dim=1)
        near = config.target_layers - 2
        tap = min(range(len(config.taps)), key=lambda each: abs(config.taps[each] - near))
        mixed = torch.zeros(len(config.taps), config.hidden, config.hidden)
        mixed[tap] = torch.eye(config.hidden)
        weights["fc.weight"] = torch.cat(list(mixed), dim=1)
        return {**weights, "d2t": drafted} if config.draft_vocab_size else weights

    def needed_signals(self, drafter: Eagle3DrafterModel) -> dict[str, Any]:
        return {"taps": drafter.config.taps}

    def signal_loss(
        self,
        drafter: Eagle3DrafterModel,
        embedding: Tensor,
        head: Tensor,
        signals: Signals,
        texts: OwnTexts,
        plan: Plan,
    ) -> tuple[nn.Module, Loss, Rows]:
        prompts = (len(each.prompt) for each in texts.trained)
        answers = [start + prompt for start, prompt in zip(signals.starts, prompts, strict=False)]
        loss = SignalUnrolledLoss(drafter.model, embedding, head, signals, answers, self.preset)
        return Unrolled(drafter.model), loss, Answers(signals.starts, answers, 0)

    def shape_section(self, drafter: Eagle3DrafterModel) -> str:
        config = drafter.config
        context = f"the last {config.window} positions" if config.window else "all positions"
        return f"""\
- {parameters(drafter.model)}, in 8-bit blocks: one layer of width {config.hidden},
  {config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim}, feed-forward
  {config.intermediate}, over {context}
- fuses the outputs of target layers {", ".join(map(str, config.taps))} (0 is the first of
  {config.target_layers}){" after a norm of each" if config.fc_norm else ""}, and reads its own
  output {"after" if config.norm_output else "before"} the final norm
- drafts the {config.drafted:,} most frequent of {config.vocab_size:,} tokens; embedding and LM head
  are the target's and not in this folder"""

    def training_section(self, objective: Objective) -> str:
        preset = self.preset
        text = f"from {preset.own_from:.0%} of the time on, only texts that the target wrote"
        if preset.conversations:
            text = (
                "the layer begins as a copy of the target's last one, and the drafter is measured "
                f"with trees of {self.trees['max_nodes']} nodes and 8-bit weights"
            )
        return f"""\
A step: {preset.rows} rows of {preset.length} tokens; {text}.
KL divergence from the target's distribution at {preset.levels} depths, each weighted
{preset.depth_decay:g} of the one before (training-time test); {objective.rates}."""
