"""A training run of a LongSpec layer, from a target's folder to a drafter's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.drafter.methods.longspec import LongSpecConfig, LongSpecModel
from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.drafter import (
    Objective,
    Texts,
    parameters,
    rounds_section,
    train_drafter,
)
from paceline.train.drafter_models import LongSpecDrafter
from paceline.train.heldout import Heldout, Rounds, write_groups
from paceline.train.identity import begin_run
from paceline.train.longspec.lagged import LaggedLayer
from paceline.train.longspec.objective import LaggedLoss
from paceline.train.longspec.preset import LongSpecPreset
from paceline.train.longspec.target import FrozenTarget
from paceline.train.loop import Run
from paceline.train.schedule import Plan

_LOGGED_PROMPT = 300  # tokens of the prompts that are measured while training
_CARD_PROMPTS = (300, 1024, 2048, 3840)
_MEASURED_FILES = 12
_WIDTHS, _MAX_NODES = "12,16", 36  # nodes per level of the measured trees; the last holds on


def train_longspec(
    target_folder: Path, corpus: Corpus, preset: LongSpecPreset, run: Run, out: Path
) -> LongSpecModel:
    """Train a layer for the target in `target_folder` and write its folder and card to `out`.

    Text: `corpus`, and `preset.own_texts` texts that the target writes. Returns the layer, fp32.

    Raises what `begin_run` raises.
    """
    begin_run(run, out, "longspec", preset, corpus, target=target_folder)
    texts = Texts.load(target_folder, corpus, preset.own_texts, run)
    config = LongSpecConfig.for_target(
        target_folder, window=preset.window, intermediate=preset.intermediate
    )
    torch.manual_seed(0)
    model = LongSpecModel(config).to(run.device)
    drafter = LongSpecDrafter(target_folder, model, preset.levels)
    batches = texts.batches(preset.files)
    plan = Plan(preset.stages, run.minutes, run.steps, focus=len(texts.own))
    target = FrozenTarget(target_folder, run.device, config.target_layer)
    loss = LaggedLoss(target, batches, preset, plan)
    objective = Objective(LaggedLayer(model), loss, preset.muon_rate, preset.adamw_rate)
    options = {"widths": _WIDTHS, "depth": str(preset.levels), "max_nodes": str(_MAX_NODES)}

    def heldout(split: str, documents: Sequence[list[int]], *lengths: int) -> Heldout:
        groups = write_groups(texts.decoder, {split: documents}, lengths, _MEASURED_FILES)
        return Heldout(drafter, texts.decoder, groups, {"": options})

    logged = heldout("held out", texts.heldout, _LOGGED_PROMPT)
    notes = {"files": len(texts.trained[: preset.files]), "own_texts": len(texts.own)}
    progress = train_drafter(drafter, objective, batches, plan, run, logged, notes, out)
    if progress is not None:
        rounds: Rounds = {}
        known = _known(target_folder, texts)
        for split, part in (("held out", texts.heldout), ("trained on by the target", known)):
            rounds |= heldout(split, part, *_CARD_PROMPTS).measure(out)
        card = _card(config, texts, preset, objective, progress, model)
        (out / "README.md").write_text(f"{card}\n{rounds_section(rounds)}")
    return model


def _known(target: Path, texts: Texts) -> list[list[int]]:
    """Training files that the target's manifest names; none if it has no manifest."""
    manifest = target / "corpus.json"
    if not manifest.is_file():
        return []
    known = {row["sha256"] for row in json.loads(manifest.read_text())["train"]}
    pairs = zip(texts.corpus.train, texts.trained, strict=True)
    return [ids for document, ids in pairs if document.sha256 in known]


def _card(
    config: LongSpecConfig,
    texts: Texts,
    preset: LongSpecPreset,
    objective: Objective,
    progress: Progress,
    model: LongSpecModel,
) -> str:
    lags = preset.trained_lags
    noise = (
        f"Flash noisy training with lags 1 to {lags[-1]}, {preset.lags} of them in each step, each "
        f"weighted {preset.lag_decay:g} relative to the one before."
        if len(lags) > 1
        else "Without flash noisy training: lag 1 alone."
    )
    stages = "\n".join(
        f"| {s.name} | {s.share:.0%} | {s.rows} x {s.length} | {s.rate:g} | "
        f"{'anchor-offset' if s.offset and preset.offset else 'plain'} | "
        f"{'own texts' if s.focus else 'files and own texts'} |"
        for s in preset.stages
    )
    return f"""# Paceline demo drafter: LongSpec layer

Drafter method `longspec` (LongSpec, section 3) for the demo target. It works with no other model:
`config.json` holds the target's fingerprint.

- {parameters(model)}, in 8-bit blocks: one layer of width {config.hidden}, {config.q_heads} heads over
  {config.kv_heads} KV heads of {config.head_dim}, feed-forward {config.intermediate}, window
  {config.window}
- reads keys and values of target layer {config.target_layer} (0 is the first of
  {config.target_layers}); embedding and LM head are the target's and not in this folder
- measured with trees of {preset.levels} levels, {_WIDTHS} nodes wide (the last for all deeper
  levels), {_MAX_NODES} nodes at most

{texts.card_section(preset.files)}

## Training

{progress.description}.
KL divergence from the target's distribution; {objective.rates}.
{noise}

| stage | share of the time | tokens a step | rate | positions | text |
| --- | --- | --- | --- | --- | --- |
{stages}
"""
