"""A run that trains a drafter further on recorded texts, from one folder to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.train.batches import Batches
from paceline.train.corpus import Corpus
from paceline.train.drafter import Objective, Texts, train_drafter
from paceline.train.drafter_models import (
    DrafterModel,
    DSparkDrafter,
    LmDrafter,
    LongSpecDrafter,
    read_drafter,
)
from paceline.train.dspark.objective import BlockDrafter, BlockLoss
from paceline.train.dspark.preset import PRESETS as DSPARK_PRESETS
from paceline.train.dspark.target import TappedTarget
from paceline.train.heldout import Heldout, accepted_length, write_after
from paceline.train.identity import begin_run
from paceline.train.longspec.lagged import LaggedLayer
from paceline.train.longspec.objective import LaggedLoss
from paceline.train.longspec.preset import PRESETS as LONGSPEC_PRESETS
from paceline.train.longspec.target import FrozenTarget
from paceline.train.loop import Loss, Run
from paceline.train.online.preset import OnlinePreset
from paceline.train.online.texts import recorded_texts
from paceline.train.schedule import Plan, Stage

RECORDED, OLD = "recorded", "old"
"""Groups of held-out texts: recorded ones, and texts of the kind the drafter was made with."""

_PROMPT = 300  # tokens of the prompts of old texts
_OLD_TEXTS = 12  # at each temperature
_FINAL_RATE = 0.05


def train_online(
    target_folder: Path,
    start: Path,
    recordings: Path,
    corpus: Corpus,
    preset: OnlinePreset,
    run: Run,
    out: Path,
) -> None:
    """Train the drafter in `start` further on recorded texts; write its folder and card to `out`.

    `start` is a LongSpec layer, a DSpark drafter or a small language model, made for the target in
    `target_folder`; `recordings` is the folder of a drafter service's `--record`. Besides the
    recorded texts, texts that the target writes and files of `corpus` are read, against forgetting.
    Copies of the recorded texts are kept in `run.work`.

    Raises ValueError if the drafter does not fit the target or there are too few texts, and what
    `begin_run` raises.
    """
    begin_run(
        run, out, "online", preset, corpus, target=target_folder, start=start, recordings=recordings
    )
    kinds = (LongSpecDrafter, DSparkDrafter, LmDrafter)
    drafter = read_drafter(start, target_folder, run.device, kinds)
    recorded = recorded_texts(recordings, target_folder, run.work)
    texts = Texts.load(target_folder, corpus, preset.old_texts if preset.old_share else 0, run)
    new = [[*text.prompt, *text.tokens] for text in recorded.trained]
    total = sum(map(len, new))
    old_tokens = round(total * preset.old_share / (1 - preset.old_share))
    old = first_tokens([*texts.own, *texts.trained], old_tokens)
    batches = Batches([*new, *old], texts.eos)
    torch.manual_seed(0)
    stage = Stage("recorded", 1.0, preset.rows[drafter.method], preset.length, offset=True)
    plan = Plan((stage,), run.minutes, run.steps, 0, preset.warm_up, _FINAL_RATE)
    module, loss = _module_and_loss(drafter, batches, plan, texts.eos, run.device)
    rates = preset.muon_rate[drafter.method], preset.adamw_rate[drafter.method]
    objective = Objective(module, loss, *rates)
    old_heldout = [
        text
        for heat in (0.0, 1.0)
        for text in write_after(texts.decoder, texts.heldout, _PROMPT, heat, _OLD_TEXTS)
    ]
    groups = {RECORDED: recorded.heldout, OLD: old_heldout}
    heldout = Heldout(drafter, texts.decoder, groups)
    before = heldout.measure(start)
    if (RECORDED, "") not in before:
        raise ValueError("the recorded texts are too short for a round: record longer ones")
    notes = {
        "from": start.name,
        "recorded_texts": len(new),
        "recorded_tokens": total,
        "old_tokens": sum(map(len, old)),
    }
    progress = train_drafter(drafter, objective, batches, plan, run, heldout, notes, out)
    if progress is None:
        return
    after = heldout.measure(out)
    rows = "\n".join(
        f"| {group} | {accepted_length(rounds):.2f} | {accepted_length(after[group, '']):.2f} |"
        for (group, _), rounds in before.items()
    )
    card = f"""# Paceline drafter, trained further on recorded texts

Drafter method `{drafter.method}`, trained further from `{start.name}`; it drafts for the same
targets. Its weights depend on recorded texts: share it only with those who may read these.

## Training

{progress.description}; {objective.rates}. Data: {len(new):,} recorded texts, {total:,} tokens
with their prompts, and {notes["old_tokens"]:,} tokens of texts that the target wrote and of files
of the {corpus.source}.

## Measured

Accepted length, bonus included, before training and after; old: texts that the target wrote after
held-out files of the {corpus.source}.

| held-out texts | before | after |
| --- | --- | --- |
{rows}
"""
    (out / "README.md").write_text(card)


def first_tokens(documents: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """The first `count` tokens of a list of documents, the last one cut."""
    taken, left = list[Sequence[int]](), count
    for ids in documents:
        if left <= 0:
            break
        taken.append(ids[:left])
        left -= len(ids)
    return taken


def _module_and_loss(
    drafter: DrafterModel, batches: Batches, plan: Plan, separator: int, device: str
) -> tuple[nn.Module, Loss]:
    """The module to train and the objective that the drafter was made with."""
    if isinstance(drafter, DSparkDrafter):
        tapped = TappedTarget(drafter.target, device, drafter.config.taps)
        preset = DSPARK_PRESETS["cpu"]
        loss = BlockLoss(drafter.model, tapped, batches, preset, separator)
        return BlockDrafter(drafter.model), loss
    if isinstance(drafter, LongSpecDrafter):
        layer_preset = replace(LONGSPEC_PRESETS["cpu"], levels=drafter.levels)
        target = FrozenTarget(drafter.target, device, drafter.config.target_layer)
        return LaggedLayer(drafter.model), LaggedLoss(target, batches, layer_preset, plan)
    return drafter.model, _distillation(FrozenTarget(drafter.target, device, 0), batches)


def _distillation(target: FrozenTarget, batches: Batches) -> Loss:
    """KL divergence of a language model from the target, at every token."""

    def loss(forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        tokens = batches.stream[indices[:, :-1]].to(target.head.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden, _, _ = target.read(tokens, positions)
        teacher = F.linear(hidden, target.head).float().log_softmax(-1)
        student = forward(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True)
        return divergence.sum(-1).mean()

    return loss
