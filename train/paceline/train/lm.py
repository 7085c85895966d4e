"""Training of a small language model that drafts under KV budgets (BudgetDraft, section 3).

A text is a prefix, which is read, and a continuation, which is learnt: the target's likeliest next
tokens, with the drafter's KV of the whole prefix and once more with the part that a budget keeps.
Unlike the paper's, updates may have a low rank, so that two CPU cores can train half a billion
parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache
from paceline.drafter import Drafter, Resources
from paceline.drafter.growth.observed import TopChunks
from paceline.drafter.growth.sequence import chain_blocks
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import CONFIG_FILE
from paceline.drafter.methods.lm import OBSERVED, LmDrafter
from paceline.kernels import plan_trees
from paceline.train.batches import Batches
from paceline.train.blocks import store_blocks
from paceline.train.corpus import Corpus, encode_all, load_tokenizer
from paceline.train.drafters import (
    Heldout,
    Objective,
    origin,
    rounds_section,
    train_drafter,
    write_groups,
)
from paceline.train.model import load_model
from paceline.train.presets import Plan, Stage
from paceline.train.recipes.lm import BudgetPreset
from paceline.train.run import Run, begin_run

_PART = 1024  # tokens of a forward pass over a prefix
_TEXTS = 6  # held-out texts that are measured


class LowRankUpdate(nn.Module):
    """An update of low rank of a linear layer: 0 at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        layer.register_forward_hook(self._add)

    def _add(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + F.linear(F.linear(inputs[0], self.down), self.up)

    @property
    def delta(self) -> Tensor:
        return self.up @ self.down


class TrainedModel(nn.Module):
    """A language model of transformers; its parameters are those that are trained."""

    def __init__(self, model: Any, rank: int) -> None:
        """Train updates of this rank of the matrices in the layers; 0: all weights."""
        super().__init__()
        self.language_model = [model.requires_grad_(not rank)]  # a list: no part of this module
        self.updates = nn.ModuleDict()
        if not rank:
            self.whole = model
            return
        for name, layer in model.model.layers.named_modules():
            if isinstance(layer, nn.Linear):
                self.updates[name.replace(".", "/")] = LowRankUpdate(layer, rank)

    def forward(self, tokens: Tensor, past: Sequence[tuple[Tensor, Tensor]], begin: int) -> Tensor:
        """Logits ``[n, V]`` after tokens ``[n]``, which are at the positions from ``begin`` on.

        Args:
            past: Keys and values of each layer that they see before them, ``[1, Hkv, m, D]``.
        """
        [model] = self.language_model
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        seen = torch.ones(1, past[0][0].shape[2] + len(tokens), dtype=torch.int64)
        positions = torch.arange(begin, begin + len(tokens))[None]
        logits: Tensor = model(
            input_ids=tokens[None], past_key_values=cache, use_cache=True,
            position_ids=positions.to(tokens.device), attention_mask=seen.to(tokens.device),
        ).logits[0]  # fmt: skip
        return logits

    @torch.no_grad()
    def read(self, prefix: Tensor) -> tuple[list[tuple[Tensor, Tensor]], TopChunks]:
        """Keys and values of each layer after the tokens ``[n]`` of a prefix, and the scores of its
        chunks as a drafter has them: attention of the newest rows, over all layers and heads."""
        [model] = self.language_model
        cache, length = DynamicCache(), len(prefix)
        for start in range(0, length - OBSERVED, _PART):
            part = prefix[start : min(start + _PART, length - OBSERVED)]
            model.model(input_ids=part[None], past_key_values=cache, use_cache=True)
        model.set_attn_implementation("eager")  # the others return no weights
        seen = model.model(
            input_ids=prefix[None, -OBSERVED:], past_key_values=cache, use_cache=True,
            output_attentions=True,
        ).attentions  # fmt: skip
        model.set_attn_implementation("sdpa")
        scores = TopChunks()
        for weights in seen:
            scores.add(torch.arange(length), weights[0].float().sum((0, 1)).cpu())
        layers: list[Any] = cache.layers
        return [(layer.keys, layer.values) for layer in layers], scores

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write the language model with its updates, without changing it."""
        [model] = self.language_model
        weights = dict(model.state_dict())
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        for name, update in self.updates.items():
            weight = f"model.layers.{name.replace('/', '.')}.weight"
            weights[weight] = weights[weight] + update.delta
        plain = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
        model.save_pretrained(folder, state_dict=plain)


@dataclass
class LmDrafterModel:
    """A small language model in training; see :class:`~paceline.train.drafters.DrafterModel`."""

    start: Path  # the model that it was, whose tokenizer it has
    model: TrainedModel
    hidden_state_layers: Sequence[int] = ()

    def calibrate(self, heldout: Heldout) -> None:
        """Nothing: its confidences are its probabilities."""

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(folder)
        store_blocks(folder)
        load_tokenizer(self.start).save_pretrained(folder)
        config = json.loads((folder / CONFIG_FILE).read_text())
        config[SECTION] = {"method": LmDrafter.method, "training": dict(notes or {})}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    def load_drafter(self, folder: Path, options: Mapping[str, str]) -> Drafter:
        return LmDrafter.load(folder, options, Resources())


class BudgetLoss:
    """The :data:`~paceline.train.loop.Loss` of a run: L_A + lambda L_C (equations 4 to 7).

    Budgets are drawn from torch's global generator, which a checkpoint keeps.
    """

    def __init__(
        self, model: TrainedModel, target: Decoder, stream: Tensor, preset: BudgetPreset
    ) -> None:
        self._model, self._target, self._stream, self._preset = model, target, stream, preset

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        preset = self._preset
        total = torch.zeros(())
        for text in self._stream[indices[:, :-1]]:
            budgets = preset.budget_weights
            draw = torch.multinomial(torch.tensor([*budgets.values()]), 1)
            total = total + self.of_text(forward, text, [*budgets][int(draw)])
        return total / len(indices)

    def of_text(self, forward: nn.Module, text: Tensor, budget: int) -> Tensor:
        """Nats per token of a text, int64 ``[prefix + continuation]``, under a budget."""
        prefix = self._preset.prefix
        device = next(forward.parameters()).device
        wanted = likeliest(self._target, text, prefix).to(device)
        tokens = text.to(device)
        past, scores = self._model.read(tokens[:prefix])
        kept = scores.select(prefix, budget, newest=0).to(device)
        sparse = [(keys[:, :, kept], values[:, :, kept]) for keys, values in past]
        losses = [
            F.cross_entropy(forward(tokens[prefix:], seen, prefix).float(), wanted)
            for seen in (past, sparse)
        ]
        return losses[0] + self._preset.sparse_weight * losses[1]


def likeliest(target: Decoder, text: Tensor, begin: int) -> Tensor:
    """The target's likeliest token after each token of a text from ``begin`` on, int64 ``[n]``."""
    cache, count = LocalCache(target.config, target.device), len(text)
    for start in range(0, begin, _PART):
        part = text[start : min(start + _PART, begin)]
        _forward(target, part, cache, torch.tensor([0]))
    return _forward(target, text[begin:], cache, torch.arange(count - begin)).argmax(-1)


def _forward(target: Decoder, part: Tensor, cache: LocalCache, rows: Tensor) -> Tensor:
    plan = plan_trees(chain_blocks(0, len(cache), len(cache) + len(part)), device=target.device)
    cache.reserve(len(part))
    device = target.device
    logits = target.forward(part.to(device), plan, [cache], logit_rows=rows.to(device)).logits
    cache.commit(range(len(part)))
    return logits


@dataclass
class LmTrainer:
    """Trains a small language model further for the target in a folder or file."""

    target: Path
    preset: BudgetPreset

    def train(self, corpus: Corpus, run: Run, out: Path, start: Path) -> None:
        """Train the model in `start`; write its folder and card to `out`.

        Raises ValueError: it has another tokenizer than the target, or its context is too short;
        and what `begin_run` raises.
        """
        preset = self.preset
        begin_run(run, out, "lm", preset, corpus, target=self.target, start=start)
        tokenizer = load_tokenizer(start)
        if tokenizer.get_vocab() != load_tokenizer(self.target).get_vocab():
            raise ValueError(f"{start} has other tokens than {self.target}: no model can draft so")
        decoder = load_decoder(self.target, "int8")
        torch.manual_seed(0)
        model = TrainedModel(load_model(start, torch.float32).to(run.device), preset.rank)
        model.to(run.device)
        trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
        batches = Batches(trained, tokenizer.eos_token_id)
        loss = BudgetLoss(model, decoder, batches.stream, preset)
        objective = Objective(model, loss, None, preset.adamw_rate)
        length = preset.prefix + preset.continuation
        stages = (Stage("budgets", 1.0, rows=1, length=length),)
        plan = Plan(stages, run.minutes, run.steps, warm_up=preset.warm_up)
        chains = {"widths": "1", "depth": "5", "min_survival": "0"}
        kept = {"keep": "budget", "kv_policy": "chunk_topk"}
        options = {"all positions": chains} | {
            f"{budget} positions": {**chains, **kept, "context": str(budget)}
            for budget in preset.budgets
        }
        drafter: Any = LmDrafterModel(start, model)
        groups = write_groups(decoder, {"held out": heldout}, (preset.prefix,), _TEXTS)
        measured = Heldout(drafter, decoder, groups, options)
        notes = {"budgets": preset.budgets, "prefix": preset.prefix, "rank": preset.rank}
        progress = train_drafter(drafter, objective, batches, plan, run, measured, notes, out)
        if progress is None:
            return
        weights = f"Updates of rank {preset.rank}" if preset.rank else "All weights"
        (out / "README.md").write_text(f"""# Paceline drafter: `lm`

A small language model that was trained further to draft under KV budgets (BudgetDraft).

## Training

{origin(progress)}. Cross-entropy with the target's likeliest tokens, behind
{preset.prefix:,} tokens and, with weight {preset.sparse_weight:g}, behind what a budget of
{", ".join(map(str, preset.budgets))} positions keeps of them. {weights}, {objective.rates}.

{rounds_section(measured.measure(out))}""")
