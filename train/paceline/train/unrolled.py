"""Training of a layer over its own outputs: training-time test (EAGLE-3, section 3.2).

`eagle3` and `mtp` are trained like this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.convert import ModelSource, load_decoder, open_model
from paceline.train.batches import Answers, Batches, RowStream
from paceline.train.conversations import OwnTexts
from paceline.train.drafters import DrafterModel, Objective
from paceline.train.longspec import divergence
from paceline.train.loop import Loss
from paceline.train.modules.feedback import FeedbackModel
from paceline.train.presets import Plan, UnrolledPreset
from paceline.train.signals import Signals, TappedTarget
from paceline.train.trainer import LayerTrainer

_FIRST_NORM = 0.25  # of the target's
P = TypeVar("P", bound=UnrolledPreset)
D = TypeVar("D", bound=DrafterModel)


@dataclass(frozen=True)
class TrainingRows:
    """B rows of S tokens, the last Q of which predict.

    A column is a token and the target's states of the position before it.
    """

    embedded: Tensor  # the target's embedding of the tokens, `[B, S, hidden]`
    # Outputs of the tapped layers, side by side, or of the final norm, `[B, S, states]`.
    states: Tensor
    positions: Tensor  # of the tokens in their texts, rising in each row, int64 `[B, S]`
    real: Tensor  # which columns are of the row's text, bool `[B, S]`
    count: int  # q


class Unrolled(nn.Module):
    """Outputs of the layer for several depths: one depth's are inputs of the next.

    As while drafting, a token at depth d reads the target's states up to d positions before it, and
    behind those the layer's own outputs of the depths before (EAGLE-3, figure 6).
    """

    def __init__(self, model: FeedbackModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: TrainingRows, depths: int) -> Tensor:
        """Return hidden states for the LM head, `[depths, B, Q, hidden]`.

        Of the rows at depth d, counted from 0, the first d are undefined: there is no output to
        read.
        """
        model, last = self.model, slice(-rows.count, None)
        embedded, hidden = rows.embedded, model.fuse(rows.states)
        positions, past, outputs = rows.positions, None, []
        for depth in range(depths):
            seen = self._seen(rows, depth)
            out, again, new = model(embedded, hidden, positions, seen, past)
            outputs.append(out)
            past = new if past is None else (_join(past[0], new[0]), _join(past[1], new[1]))
            embedded, positions = rows.embedded[:, last], rows.positions[:, last]
            hidden = F.pad(again[:, :-1], (0, 0, 1, 0))
        return torch.stack(outputs)

    def _seen(self, rows: TrainingRows, depth: int) -> Tensor:
        """Tell which keys the tokens at a depth attend to: the rows', then each depth's."""
        count, window = rows.count, self.model.config.window
        places = torch.arange(rows.positions.shape[1], device=rows.positions.device)
        apart = places[-count:, None] - places
        text = (apart >= depth) & rows.real[:, None]
        if window:
            text &= apart < window
        if not depth:
            text |= apart == 0  # or a column beyond the text would read nothing
        identity = torch.eye(count, dtype=torch.bool, device=places.device)
        # The token j places earlier was read at depth - j.
        later = [
            torch.roll(identity, -j, 1).tril() & (not window or j < window)
            for j in reversed(range(depth))
        ]
        return torch.cat([text, *(mask.expand(len(text), -1, -1) for mask in later)], dim=-1)


def _join(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat([past, new], dim=2)


def depth_weights(counted: Tensor, preset: UnrolledPreset) -> Tensor:
    """Return the weights of predictions, fp32 `[depths, B * Q]`, that add up to 1.

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
        self, model: FeedbackModel, target: TappedTarget, batches: Batches, preset: UnrolledPreset
    ) -> None:
        self._model, self._target, self._batches = model, target, batches
        self._preset = preset

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        target = self._target
        tokens = self._batches.stream[indices].to(target.head.device)
        count, length = tokens.shape
        states, hidden = (signal.view(count, length, -1) for signal in target.read(tokens))
        if self._model.reads_final:
            states = hidden
        positions = torch.arange(1, length - 1, device=tokens.device).expand(count, -1)
        rows = TrainingRows(
            target.embed(tokens[:, 1:-1]).float(), states[:, :-2].float(), positions,
            torch.ones_like(positions, dtype=torch.bool), length - 2,
        )  # fmt: skip
        outputs = forward(rows, self._preset.levels)
        counted = self._model.draft_rows(tokens[:, 2:]) < self._model.config.drafted
        weights = depth_weights(counted, self._preset)
        head = self._model.draft_head(target.head.float())
        return divergence(outputs.flatten(1, 2), hidden[:, 1:-1].flatten(0, 1), head, weights)


class SignalUnrolledLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over answers: KL divergence at every depth.

    Both distributions are over the drafted tokens. A prediction counts if the next token of the
    text is a drafted one, as in the paper.
    """

    def __init__(
        self, model: FeedbackModel, vocabulary: Tensor, head: Tensor, signals: Signals,
        answers: Sequence[int], preset: UnrolledPreset,
    ) -> None:  # fmt: skip
        """Train `model`.

        `vocabulary` and `head` are the target's embedding and LM head; `answers` the indices of the
        first token of each text's answer.
        """
        self._model, self._signals, self._preset = model, signals, preset
        self._embedding, self._head = vocabulary, model.draft_head(head)
        self._states = signals.hidden if model.reads_final else signals.taps
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
            self._embedding[signals.tokens[tokens]].float(), self._states[tokens - 1].float(),
            tokens - starts, real, count,
        )  # fmt: skip
        outputs = forward(rows, self._preset.levels)
        last = tokens[:, -count:]
        drafted = self._model.draft_rows(signals.tokens[last + 1]) < config.drafted
        weights = depth_weights(drafted & real[:, -count:], self._preset)
        hidden = signals.hidden[last].flatten(0, 1)
        return divergence(outputs.flatten(1, 2), hidden, self._head, weights)


class UnrolledTrainer(LayerTrainer[P, D]):
    """Trains layers over their own outputs. Their LM head is the target's, frozen."""

    trees: ClassVar[Mapping[str, str]] = {"widths": "4,4,4", "max_nodes": "8", "weights": "int8"}

    def text_loss(
        self, drafter: D, batches: Batches, plan: Plan, separator: int, device: str
    ) -> tuple[nn.Module, Loss]:
        source, model = open_model(self.target), drafter.model
        assert isinstance(model, FeedbackModel)
        decoder, taps = load_decoder(source, device=device), self.needed_signals(drafter)
        reader = TappedTarget(decoder, source, taps.get("taps", ()))
        preset = replace(self.preset, levels=drafter.levels)
        return Unrolled(model), UnrolledLoss(model, reader, batches, preset)

    def needed_signals(self, drafter: D) -> dict[str, Any]:
        model = drafter.model
        assert isinstance(model, FeedbackModel)
        return {} if model.reads_final else {"taps": model.config.taps}

    def signal_loss(
        self, drafter: D, embedding: Tensor, head: Tensor, signals: Signals, texts: OwnTexts,
        plan: Plan,
    ) -> tuple[nn.Module, Loss, RowStream]:  # fmt: skip
        model = drafter.model
        assert isinstance(model, FeedbackModel)
        prompts = (len(text.prompt) for text in texts.trained)
        answers = [start + prompt for start, prompt in zip(signals.starts, prompts, strict=False)]
        loss = SignalUnrolledLoss(model, embedding, head, signals, answers, self.preset)
        return Unrolled(model), loss, Answers(signals.starts, answers, 0)

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


def layer_weights(source: ModelSource, prefix: str, layers: int, final: str) -> dict[str, Tensor]:
    """Return weights to begin with, copies of the target's last layer without its projections of
    queries, keys and values. Names begin with `prefix`; the final norm's is `final`.
    """
    base = f"model.layers.{layers - 1}."

    def read(name: str) -> Tensor:
        return source.tensor(f"{name}.weight", torch.float32, "cpu")

    same = ["post_attention_layernorm", "self_attn.o_proj"]
    same += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    weights = {f"{prefix}{name}.weight": read(base + name) for name in same}
    return {**weights, f"{final}.weight": read("model.norm") * _FIRST_NORM}
