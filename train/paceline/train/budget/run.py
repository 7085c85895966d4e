"""A run that makes a drafter robust to its KV budget, from one drafter's folder to another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.train.batches import Batches
from paceline.train.budget.lm import ContinuedLm, LmLoss
from paceline.train.budget.longspec import ContinuedLayer, LayerLoss, ObservedTarget
from paceline.train.budget.preset import BudgetPreset
from paceline.train.card import STDLIB_HEADER, STDLIB_LICENCE
from paceline.train.corpus import Corpus
from paceline.train.drafter import Objective, Texts, train_drafter
from paceline.train.drafter_models import DrafterModel, LmDrafter, LongSpecDrafter, read_drafter
from paceline.train.heldout import Heldout, Rounds, accepted_length, write_after
from paceline.train.identity import begin_run
from paceline.train.loop import Run
from paceline.train.schedule import Plan, Stage

BUDGETS = (64, 256, 1024, 0)
"""KV budgets that are measured; 0: all. Unit: tokens."""

_MEASURED_FILES = 4
_FINAL_RATE = 0.05
_TREES: Mapping[str, Mapping[str, str]] = {
    "longspec": {"widths": "4,8,8,8", "max_nodes": "16"},
    "lm": {},
}
"""Options of the measured drafter, by method."""


def train_budget(
    target_folder: Path, start: Path, corpus: Corpus, preset: BudgetPreset, run: Run, out: Path
) -> None:
    """Train the drafter in `start` further, under KV budgets; write its folder and card to `out`.

    `start` is a LongSpec layer or a small language model, made for the target in `target_folder`.
    Text: `corpus`, and `preset.own_texts` texts that the target writes.

    Raises ValueError if the drafter does not fit the target or the preset, and what `begin_run`
    raises.
    """
    begin_run(run, out, "budget", preset, corpus, target=target_folder, start=start)
    drafter = read_drafter(start, target_folder, run.device, (LongSpecDrafter, LmDrafter))
    texts = Texts.load(target_folder, corpus, preset.own_texts, run)
    batches = texts.batches(preset.files)
    torch.manual_seed(0)
    objective = _objective(drafter, batches, preset, run.device)
    stage = Stage("budgets", 1.0, rows=1, length=preset.length)
    plan = Plan((stage,), run.minutes, run.steps, 0, preset.warm_up, _FINAL_RATE)
    lengths = (preset.length // 16, preset.length // 4, preset.length - 256)
    groups = {
        str(length): write_after(texts.decoder, texts.heldout, length, 0.0, _MEASURED_FILES)
        for length in lengths
    }
    tree = _TREES[drafter.method]
    options = {_name(budget): {"context": str(budget), **tree} for budget in BUDGETS}
    heldout = Heldout(drafter, texts.decoder, groups, options)
    settings = asdict(preset)
    notes = {name: settings[name] for name in ("budgets", "weights", "sparse_weight", "policies")}
    progress = train_drafter(drafter, objective, batches, plan, run, heldout, notes, out)
    if progress is None:
        return
    # A LongSpec layer without its target writes nothing.
    recites = drafter.method == "lm" and corpus.is_stdlib
    card = f"""{STDLIB_HEADER if recites else ""}# Paceline drafter for changing KV budgets

Drafter method `{drafter.method}`, trained further from `{start.name}` as in BudgetDraft (sections
3.3 and 3.4); it drafts for the same targets.

{texts.card_section(preset.files)}
{STDLIB_LICENCE if recites else ""}

## Training

{progress.description}; {objective.rates}.
Each step reads a row of {preset.length:,} tokens and lets the drafter continue it from
{preset.segments} positions, {preset.continuation} tokens each; the prefix has no gradient. Labels
are the target's greedy choices. {_loss_text(preset)}

## Measured

Accepted length, bonus included, of greedy texts that the target wrote after the beginnings of
held-out files; positions chosen by `streaming`. Before training and after.

{_table(heldout.measure(start), heldout.measure(out))}"""
    (out / "README.md").write_text(card)


def _objective(
    drafter: DrafterModel, batches: Batches, preset: BudgetPreset, device: str
) -> Objective:
    rates = preset.muon_rate, preset.adamw_rate
    if isinstance(drafter, LongSpecDrafter):
        config = drafter.config
        observed = ObservedTarget(drafter.target, device, config.target_layer)
        layer_loss = LayerLoss(observed, config.window, batches, preset)
        return Objective(ContinuedLayer(drafter.model), layer_loss, *rates)
    target: Any = AutoModelForCausalLM.from_pretrained(drafter.target, dtype=torch.bfloat16)
    module = ContinuedLm(drafter.model)
    return Objective(module, LmLoss(target.to(device).eval(), module, batches, preset), *rates)


def _name(budget: int) -> str:
    return f"{budget:,}" if budget else "all"


def _loss_text(preset: BudgetPreset) -> str:
    if not preset.sparse_weight:
        return "Full-cache loss alone: every position before a token is visible."
    total = sum(preset.weights)
    shares = ", ".join(
        f"{budget} ({weight / total:.0%})"
        for budget, weight in zip(preset.budgets, preset.weights, strict=True)
    )
    return (
        f"Loss: full cache, and {preset.sparse_weight:g} times the same under a\nKV budget of "
        f"{shares} tokens, chosen by {' or '.join(f'`{name}`' for name in preset.policies)}."
    )


def _table(before: Rounds, after: Rounds) -> str:
    names: Sequence[str] = [_name(budget) for budget in BUDGETS]
    lines = [
        "| prompt | " + " | ".join(f"B = {name}" for name in names) + " |",
        "| --- " * (1 + len(names)) + "|",
    ]
    for group in sorted({group for group, _ in before}, key=int):
        pairs = [(before[group, name], after[group, name]) for name in names]
        cells = [f"{accepted_length(a):.2f} → {accepted_length(b):.2f}" for a, b in pairs]
        lines.append(f"| {int(group):,} tokens | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
