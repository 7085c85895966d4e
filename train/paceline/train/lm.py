"""Training of a small language model that drafts under KV budgets (BudgetDraft, section 3).

A text is a prefix, a piece of a document, which is read, and a continuation, which is learnt: what
the target writes behind the prefix greedily, with the drafter's KV of the whole prefix and once
more with the part that a budget keeps. Unlike the paper's, updates may have a low rank (LoRA): in
the projections of attention and feed-forward of a transformers model, merged when it is written, so
that two CPU cores can train half a billion parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from paceline.convert import weights_fingerprint
from paceline.decoder import Decoder
from paceline.decoder.remembered import cache_file
from paceline.drafter import Drafter, Resources
from paceline.drafter.growth.observed import TopChunks
from paceline.drafter.methods.base import SECTION
from paceline.drafter.methods.checkpoint import CONFIG_FILE
from paceline.drafter.methods.lm import OBSERVED, LmDrafter
from paceline.kernels.sampling import SamplingRules
from paceline.train.batches import Answers
from paceline.train.blocks import store_blocks
from paceline.train.corpus import Corpus, Documents, encode_all, load_tokenizer
from paceline.train.drafters import (
    Heldout,
    Objective,
    origin,
    rounds_section,
    train_drafter,
    write_after,
)
from paceline.train.model import load_model
from paceline.train.own_text import Task, load_target, random_prompts, write_texts
from paceline.train.phases import Phase
from paceline.train.presets import Plan, Stage
from paceline.train.recipes.lm import BudgetPreset
from paceline.train.run import WRITING, Run, begin_run

_PART = 1024  # tokens of a forward pass over a prefix
_TOGETHER = 16_384  # tokens of the texts that are written together
_LOGGED_TEXTS, _MEASURED_TEXTS = 2, 6  # held-out texts that are measured while training, and after
_MEASUREMENTS = 8  # while training
_BEGUN = "texts"  # in the work folder: number of texts that the run reads


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

    def __init__(self, model: TrainedModel, stream: Tensor, preset: BudgetPreset) -> None:
        self._model, self._stream, self._preset = model, stream, preset

    def __call__(self, forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        preset = self._preset
        total = torch.zeros(())
        for text in self._stream[indices]:
            budgets = preset.budget_weights
            draw = torch.multinomial(torch.tensor([*budgets.values()]), 1)
            total = total + self.of_text(forward, text, [*budgets][int(draw)])
        return total / len(indices)

    def of_text(self, forward: nn.Module, text: Tensor, budget: int) -> Tensor:
        """Nats per token of a text, int64 ``[prefix + 1 + continuation]``, under a budget."""
        prefix = self._preset.prefix
        tokens = text.to(next(forward.parameters()).device)
        drafted, wanted = tokens[prefix:-1], tokens[prefix + 1 :]
        past, scores = self._model.read(tokens[:prefix])
        kept = scores.select(prefix, budget, newest=0).to(tokens.device)
        sparse = [(keys[:, :, kept], values[:, :, kept]) for keys, values in past]
        losses = [
            F.cross_entropy(forward(drafted, seen, prefix).float(), wanted)
            for seen in (past, sparse)
        ]
        return losses[0] + self._preset.consistency * losses[1]


def greedy_texts(
    decoder: Decoder, read: Callable[[], Documents], preset: BudgetPreset, file: Path, run: Run
) -> list[list[int]]:
    """Pieces of documents, each with what the target writes behind it greedily, whether or not it
    ends its text: `prefix + 1 + continuation` tokens.

    They are kept in `file`, which runs share; one that goes on reads those that it began with.
    Documents are `read` where texts are missing, of which none begins when the time is over.
    Raises ValueError: no document is as long as a prefix.
    """
    begun, length = run.work / _BEGUN, preset.prefix
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    lines = file.read_text().splitlines()[: preset.texts]
    texts: list[list[int]] = [json.loads(line) for line in lines]
    if begun.is_file():
        return texts[: int(begun.read_text())]
    if len(texts) < preset.texts:
        draw = np.random.default_rng(0)
        pieces = random_prompts(read(), preset.texts, draw, length)[len(texts) :]
        rules, new = SamplingRules(temperature=0.0), preset.continuation + 1
        phase = Phase("writing texts", preset.texts, len(texts), run.until(WRITING))
        begins = takewhile(lambda _: not phase.over, pieces)
        tasks = (Task(piece, rules, new) for piece in begins)
        # They end in their order, as they are equally long and none ends before.
        writing = write_texts(decoder, tasks, None, together=max(1, _TOGETHER // (length + new)))
        for number, written in writing:
            texts.append([*pieces[number], *written])
            with file.open("a") as opened:
                opened.write(json.dumps(texts[-1]) + "\n")
            phase.add()
    begun.write_text(str(len(texts)))
    return texts


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
        run = replace(run.in_fast_types(), measure=60 * run.minutes / _MEASUREMENTS)
        begin_run(run, out, "lm", preset, corpus, target=self.target, start=start)
        tokenizer = load_tokenizer(start)
        if tokenizer.get_vocab() != load_tokenizer(self.target).get_vocab():
            raise ValueError(f"{start} has other tokens than {self.target}: no model can draft so")
        decoder = load_target(self.target, "int8")
        read = partial(encode_all, tokenizer, corpus.train)
        digests = [document.sha256 for document in corpus.train]
        facts = weights_fingerprint(self.target), preset.prefix, preset.continuation, *digests
        with PartialState(cpu=torch.device(run.device).type == "cpu").main_process_first():
            texts = greedy_texts(decoder, read, preset, cache_file("texts", facts), run)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if preset.rank and run.bf16 else torch.float32
        model = TrainedModel(load_model(start, dtype).to(run.device), preset.rank)
        model.to(run.device)
        stream = torch.tensor(texts).flatten()
        starts = range(0, len(stream) + 1, len(texts[0]))
        answers = [begin + preset.prefix for begin in starts[:-1]]
        batches = Answers(starts, answers, preset.prefix)
        objective = Objective(model, BudgetLoss(model, stream, preset), None, preset.adamw_rate)
        stages = (Stage("budgets", 1.0, rows=1, length=preset.continuation + 1),)
        plan = Plan(stages, run.minutes, run.steps, warm_up=preset.warm_up)
        chains = {"widths": "1", "depth": "5", "min_survival": "0"}
        kept = {"keep": "budget", "kv_policy": "chunk_topk"}
        options = {"all positions": chains} | {
            f"{budget} positions": {**chains, **kept, "context": str(budget)}
            for budget in preset.budgets
        }
        drafter: Any = LmDrafterModel(start, model)
        heldout = encode_all(tokenizer, corpus.heldout)
        recordings = write_after(decoder, heldout, preset.prefix, 0.0, _MEASURED_TEXTS)
        logged = Heldout(
            drafter, decoder, {"held out": recordings[:_LOGGED_TEXTS]},
            dict([*options.items()][:2]),
        )  # fmt: skip
        notes = {"budgets": preset.budgets, "prefix": preset.prefix, "rank": preset.rank,
                 "consistency": preset.consistency, "texts": len(texts)}  # fmt: skip
        progress = train_drafter(drafter, objective, batches, plan, run, logged, notes, out)
        if progress is None:
            return
        measured = Heldout(drafter, decoder, {"held out": recordings}, options)
        weights = f"Updates of rank {preset.rank}" if preset.rank else "All weights"
        (out / "README.md").write_text(f"""# Paceline drafter: `lm`

A small language model that was trained further to draft under KV budgets (BudgetDraft).

## Training

{origin(progress)}. Cross-entropy with the {preset.continuation}
tokens that the target wrote greedily behind each of {len(texts):,} pieces, of {preset.prefix:,}
tokens, of the {corpus.source}, and, with weight {preset.consistency:g}, behind what a budget of
{", ".join(map(str, preset.budgets))} positions keeps of a piece. {weights}, {objective.rates}.

{rounds_section(measured.measure(out))}""")
