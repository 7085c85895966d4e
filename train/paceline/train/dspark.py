"""Training of a DSpark drafter (DSpark, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.convert import ModelSource, load_decoder, open_model
from paceline.drafter.methods.checkpoint import load_weights, read_shape
from paceline.drafter.methods.dspark import DSparkConfig
from paceline.train.batches import PADDING, Answers, Batches, RowStream
from paceline.train.calibration import fit_temperatures
from paceline.train.conversations import OwnTexts
from paceline.train.drafters import DrafterModel, Heldout, Objective, parameters
from paceline.train.loop import Loss
from paceline.train.modules import DSparkModel
from paceline.train.presets import Plan
from paceline.train.recipes.dspark import DSparkPreset
from paceline.train.signals import Signals, TappedTarget
from paceline.train.trainer import LayerTrainer

CHUNK = 256  # positions whose logits exist at once
_FIRST_NORM = 0.25  # of the target's


@dataclass(frozen=True)
class TrainingBlocks:
    """G blocks of each of B rows of S tokens."""

    anchors: Tensor  # positions in their texts, int64 `[B, G]`
    fed: Tensor  # tokens fed, anchor and masks, int64 `[B, G, block]`
    before: Tensor  # the token before each predicted one, int64 `[B, G, levels]`
    labels: Tensor  # the tokens to predict, like `before`
    # Indices into the flattened batch of the target states that predict the labels, like `before`.
    target: Tensor
    counted: Tensor  # whether the text has this label, and the row this block, bool like `before`

    @classmethod
    def draw(
        cls, config: DSparkConfig, tokens: Tensor, positions: Tensor, possible: Tensor, count: int
    ) -> TrainingBlocks:
        """Draw up to `count` random blocks of each row, from torch's global generator.

        Args:
            count: Maximum number of blocks of a row. A row with fewer such places has blocks that
                do not count.
        """
        length = tokens.shape[1]
        chance = torch.rand(tokens.shape).to(tokens.device).masked_fill(~possible, -1.0)
        best = chance.topk(min(count, length), dim=1)
        ahead = torch.arange(config.levels + 1, device=tokens.device)
        places = best.indices[..., None] + ahead
        inside = (places < length) & (best.values >= 0)[..., None]
        rows = torch.arange(len(tokens), device=tokens.device)[:, None, None] * length
        places = rows + places.clamp(max=length - 1)
        text, at = tokens.flatten()[places], positions.flatten()[places]
        shape = (*best.indices.shape, config.block)
        fed = torch.full(shape, config.mask_token, device=tokens.device)
        fed[..., 0] = text[..., 0]
        counted = (inside & (at >= 0))[..., 1:]
        return cls(at[..., 0], fed, text[..., :-1], text[..., 1:], places[..., :-1], counted)


def whole_blocks(tokens: Tensor, levels: int, separator: int) -> Tensor:
    """Return where a block may begin in rows of several texts.

    This is at the second token or later, `levels` tokens before the row's end, and never if the
    block would continue after a `separator`, where another text begins.

    Returns:
        bool `[B, S]`.
    """
    possible = torch.zeros_like(tokens, dtype=torch.bool)
    inside = (tokens != separator).unfold(1, levels, 1).all(-1)
    usable = tokens.shape[1] - levels
    possible[:, 1:usable] = inside[:, 1:usable]
    return possible


class ChunkedBlockLoss(torch.autograd.Function):
    """Cross-entropy and distance of P positions, given before the LM head.

    The gradient is computed in the forward pass, so that backward needs no logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        features: Tensor | None,
        markov: Tensor | None,
        states: Tensor,
        head: Tensor,
        weights: Tensor,
        preset: DSparkPreset,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss.

        Args:
            features: Of its sequential head, fp32 `[P, r]`, or None.
            markov: W2 of that head, fp32 `[R, r]`, or None.

        Returns the weighted sum, and the distance of each position `[P]`, which has no gradient.
        """
        if features is None or markov is None:  # a head of rank 0
            features, markov = hidden[:, :0], head[:, :0].float()
        to_hidden, to_features = torch.empty_like(hidden), torch.empty_like(features)
        to_markov, distances = torch.zeros_like(markov), torch.empty_like(weights)
        total = weights.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            weight = weights[part, None]
            logits = F.linear(hidden[part].to(head), head).float()
            drafted = logits.addmm_(features[part], markov.T).log_softmax(-1)
            wanted = F.linear(states[part].to(head), head).float().softmax(-1)
            entropy = -(wanted * drafted).sum(-1)
            drafted = drafted.exp_()
            slope = drafted - wanted  # of the entropy by the logits
            distance = slope.abs().sum(-1)
            total += ((preset.ce * entropy + preset.tv * distance) * weights[part]).sum()
            distances[part] = distance
            # Of the distance: softmax' times its slope by the probabilities, sign(p - q).
            signs = slope.sign().mul_(drafted)
            signs.addcmul_(drafted, signs.sum(-1, keepdim=True), value=-1)
            slope.mul_(preset.ce).add_(signs, alpha=preset.tv).mul_(weight)
            to_hidden[part] = slope.to(head) @ head
            to_features[part] = slope @ markov
            to_markov.addmm_(slope.T, features[part])
        ctx.save_for_backward(to_hidden, to_features, to_markov)
        ctx.mark_non_differentiable(distances)
        return total, distances

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            gradient * outer[0] if wanted else None
            for gradient, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return (*gradients, None, None, None, None)


class BlockDrafter(nn.Module):
    """Backbone and heads as one module, to be trained."""

    def __init__(self, model: DSparkModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, embedded: Tensor, blocks: TrainingBlocks, positions: Tensor, taps: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Run backbone and heads on blocks of known text. Returns of the N blocks of all rows:
        hidden states for the LM head `[N, levels, hidden]`, features of the sequential head `[N,
        levels, r]`, and logits of the confidences `[N, levels]`; None for a head that the drafter
        does not have."""
        model = self.model
        hidden = model(embedded, blocks.anchors, taps, positions).flatten(0, 1)
        features = rows = confidence = None
        if model.markov_head is not None:
            features, rows = model.markov_head(
                model.markov_rows(blocks.before).flatten(0, 1), hidden
            )
        if model.confidence_head is not None:
            confidence = model.confidence_head(hidden, rows)
        return hidden, features, confidence


class BlockLoss:
    """The :data:`~paceline.train.loop.Loss` of a run.

    Blocks are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self,
        model: DSparkModel,
        target: TappedTarget,
        batches: Batches,
        preset: DSparkPreset,
        separator: int,
    ) -> None:
        self._model, self._target, self._batches = model, target, batches
        self._preset, self._separator = preset, separator

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        model, preset, target = self._model, self._preset, self._target
        config = model.config
        tokens = self._batches.stream[indices].to(target.head.device)
        possible = whole_blocks(tokens, config.levels, self._separator)
        if not possible.any():
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} hold no block of {config.levels}: every "
                "text is shorter; give longer ones or a smaller block"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        blocks = TrainingBlocks.draw(config, tokens, positions, possible, preset.anchors)
        taps, states = target.read(tokens)
        embedded = target.embed(blocks.fed)
        drafted = forward(embedded, blocks, positions, taps.view(*tokens.shape, -1).float())
        head = model.draft_head(target.head.float())
        return _block_loss(model, drafted, blocks, states, head, preset)


def _block_loss(
    model: DSparkModel,
    drafted: tuple[Tensor, Tensor | None, Tensor | None],
    blocks: TrainingBlocks,
    states: Tensor,
    head: Tensor,
    preset: DSparkPreset,
) -> Tensor:
    """:func:`weighted_loss` of what :class:`BlockDrafter` returned.

    `states` are the target's at all tokens of the batch, `[B * S, d]`.
    """
    hidden, features, confidence = drafted
    return weighted_loss(
        hidden,
        features,
        None if model.markov_head is None else model.markov_head.markov_w2.weight,
        confidence,
        states[blocks.target.flatten(0, 1)],
        head,
        model.draft_rows(blocks.labels).flatten(0, 1),
        blocks.counted.flatten(0, 1),
        preset,
    )


def weighted_loss(
    hidden: Tensor,
    features: Tensor | None,
    markov: Tensor | None,
    confidence: Tensor | None,
    states: Tensor,
    head: Tensor,
    labels: Tensor,
    counted: Tensor,
    preset: DSparkPreset,
) -> Tensor:
    """Equation 12, a scalar: the mean over blocks of weighted sums over positions.

    The cross-entropy is with the target's distribution: it has the mean of the paper's, whose
    labels are tokens, and its gradient has less noise.

    A label that is not drafted teaches the confidence head alone, that it is never accepted, and
    ends its block.

    Args:
        features: Of its sequential head, `[N, levels, r]`, or None.
        markov: W2 of that head, `[R, r]`, or None.
        confidence: Logits of the confidences, `[N, levels]`, or None.
        labels: Rows of the text's tokens among the drafted ones, R for others, int64 `[N, levels]`.
    """
    weights, known = label_weights(labels, counted, len(head))
    used = known & (weights > 0)
    total: Tensor
    with torch.autocast(hidden.device.type, enabled=False):
        total, distances = ChunkedBlockLoss.apply(  # type: ignore[no-untyped-call]
            hidden[used].float(),
            None if features is None else features[used].float(),
            markov,
            states[used].float(),
            head,
            weights[used],
            preset,
        )
    if confidence is not None:
        distance = torch.full_like(weights, 2.0)
        distance[used] = distances
        accepted = (1 - distance / 2).clamp(0, 1)  # equation 8
        entropy = F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
        total = total + preset.certainty * (entropy * weights).sum()
    return total


def label_weights(labels: Tensor, counted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the weight of each label, fp32, and whether it is drafted, both `[N, levels]`.

    Labels are as in :func:`weighted_loss`, rows of `count` drafted tokens.
    """
    levels, other = labels.shape[1], labels == count
    reached = counted & (other.cumsum(1) - other.long() == 0)
    falling = torch.exp(-torch.arange(levels, device=labels.device) / levels)
    return falling * reached / counted[:, 0].sum(), ~other


class SignalBlockLoss:
    """The :data:`~paceline.train.loop.Loss` of a run over answers.

    Both distributions are over the drafted tokens. Blocks begin anywhere in an answer, and are
    drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self, model: DSparkModel, vocabulary: Tensor, head: Tensor, signals: Signals,
        answers: Sequence[int], preset: DSparkPreset,
    ) -> None:  # fmt: skip
        """Train `model`.

        `vocabulary` and `head` are the target's embedding and LM head; `answers` the indices of the
        first token of each text's answer.
        """
        self._model, self._signals, self._preset = model, signals, preset
        self._embedding, self._head = vocabulary, model.draft_head(head)
        starts = torch.tensor(signals.starts)
        lengths = starts.diff()
        self._positions = torch.arange(len(signals.tokens))
        self._positions -= starts[:-1].repeat_interleave(lengths)
        first = (torch.tensor(answers) - starts[:-1]).repeat_interleave(lengths)
        self._possible = self._positions >= first
        self._possible[starts[1:] - 1] = False  # no next token

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        model, signals, preset = self._model, self._signals, self._preset
        real = indices != PADDING
        indices = indices.clamp(min=0)
        positions = self._positions[indices].masked_fill(~real, -1)
        possible = self._possible[indices] & real
        tokens = signals.tokens[indices]
        blocks = TrainingBlocks.draw(model.config, tokens, positions, possible, preset.anchors)
        embedded = self._embedding[blocks.fed].float()
        taps = signals.taps[indices].float()
        drafted = forward(embedded, blocks, positions, taps)
        states = signals.hidden[indices].flatten(0, 1)
        return _block_loss(model, drafted, blocks, states, self._head, preset)


@dataclass
class DSparkDrafterModel(DrafterModel):
    method = "dspark"
    model: DSparkModel

    @property
    def config(self) -> DSparkConfig:
        return self.model.config

    def calibrate(self, heldout: Heldout) -> None:
        if self.config.confidence:
            self.model.config = replace(self.config, confidence_temperatures=())
            temperatures = fit_temperatures(heldout.chains(), self.config.levels)
            self.model.config = replace(self.config, confidence_temperatures=temperatures)


class DSparkTrainer(LayerTrainer[DSparkPreset, DSparkDrafterModel]):
    """Trains a DSpark drafter.

    The mask token of a new one is the tokenizer's end of text, which is in the target's embedding
    and never an anchor.
    """

    method = "dspark"
    trees: ClassVar[Mapping[str, str]] = {"widths": "4,4,2", "max_nodes": "8", "weights": "int8"}

    def new_drafter(self, end: int) -> DSparkDrafterModel:
        config = self.preset.config(self.target, end)
        return DSparkDrafterModel(self.target, DSparkModel(config), config.levels)

    def read(self, folder: Path, device: str) -> DSparkDrafterModel:
        config, _ = read_shape(DSparkConfig, folder)
        model = DSparkModel(config)
        model.load_state_dict(load_weights(folder, config, torch.float32))
        return DSparkDrafterModel(self.target, model.to(device), config.levels)

    def text_loss(
        self, drafter: DSparkDrafterModel, batches: Batches, plan: Plan, separator: int, device: str
    ) -> tuple[nn.Module, Loss]:
        source = open_model(self.target)
        decoder = load_decoder(source, device=device)
        target = TappedTarget(decoder, source, drafter.config.taps)
        loss = BlockLoss(drafter.model, target, batches, self.preset, separator)
        return BlockDrafter(drafter.model), loss

    def initial_weights(
        self, source: ModelSource, drafter: DSparkDrafterModel
    ) -> dict[str, Tensor]:
        """Return the weights of the target's last layers, by the names of a DSparkModel.

        The context of the layers is what the first of them reads in the target, as near as a tap
        is. Mask tokens are new to them: the final norm is small at first, so that logits are nearly
        even and not wrong by far.
        """
        config = drafter.config
        first = config.target_layers - config.layers
        names = {"hidden_norm": f"model.layers.{first}.input_layernorm", "norm": "model.norm"}
        for index in range(config.layers):
            parts = ["input_layernorm", "post_attention_layernorm"]
            parts += [f"self_attn.{name}_proj" for name in "qkvo"]
            parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
            names |= {f"layers.{index}.{p}": f"model.layers.{first + index}.{p}" for p in parts}
        weights = {
            f"{key}.weight": source.tensor(f"{name}.weight", torch.float32, "cpu")
            for key, name in names.items()
        }
        near = min(range(len(config.taps)), key=lambda tap: abs(config.taps[tap] - (first - 1)))
        mixed = torch.zeros(len(config.taps), config.hidden, config.hidden)
        mixed[near] = torch.eye(config.hidden)
        weights["fc.weight"] = torch.cat(list(mixed), dim=1)
        weights["norm.weight"] *= _FIRST_NORM
        return weights

    def needed_signals(self, drafter: DSparkDrafterModel) -> dict[str, Any]:
        return {"taps": drafter.config.taps}

    def signal_loss(
        self, drafter: DSparkDrafterModel, embedding: Tensor, head: Tensor, signals: Signals,
        texts: OwnTexts, plan: Plan,
    ) -> tuple[nn.Module, Loss, RowStream]:  # fmt: skip
        prompts = (len(text.prompt) for text in texts.trained)
        answers = [start + prompt for start, prompt in zip(signals.starts, prompts, strict=False)]
        loss = SignalBlockLoss(drafter.model, embedding, head, signals, answers, self.preset)
        batches = Answers(signals.starts, answers, drafter.config.window)
        return BlockDrafter(drafter.model), loss, batches

    def shape_section(self, drafter: DSparkDrafterModel) -> str:
        config = drafter.config
        heads = "no sequential head and no confidence head: this is DFlash"
        if config.markov_rank:
            confidence = "a confidence head" if config.confidence else "no confidence head"
            rank = f"sequential head of rank {config.markov_rank}"
            heads = f"{rank}, {confidence}"
        if config.confidence_temperatures:
            numbers = ", ".join(f"{divisor:.2f}" for divisor in config.confidence_temperatures)
            heads += f", whose logits are divided by {numbers} at positions 1 to {config.levels}"
        context = f"the last {config.window} positions" if config.window else "all positions"
        return f"""\
- {parameters(drafter.model)}, in 8-bit blocks: backbone of {config.layers} layers, width
  {config.hidden}, {config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim},
  feed-forward {config.intermediate}
- blocks of {config.block} tokens, {config.levels} of them drafted; {heads}
- reads the outputs of target layers {", ".join(map(str, config.taps))} (0 is the first of
  {config.target_layers}) at {context}
- drafts the {config.drafted:,} most frequent of {config.vocab_size:,} tokens; embedding and LM head
  are the target's and not in this folder"""

    def training_section(self, objective: Objective) -> str:
        preset = self.preset
        text = f"from {preset.own_from:.0%} of the time on, only texts that the target wrote"
        if preset.conversations:
            text = (
                "the layers begin as copies of the target's last ones, and the drafter is measured "
                f"with trees of {self.trees['max_nodes']} nodes and 8-bit weights"
            )
        return f"""\
A step: {preset.rows} rows of {preset.length} tokens, {preset.anchors} random blocks in each;
{text}.
Weights of the losses: cross-entropy {preset.ce:g}, distance {preset.tv:g}, confidence
{preset.certainty:g} (DSpark, section 3.3); {objective.rates}."""
