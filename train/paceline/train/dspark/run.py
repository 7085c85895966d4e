"""A training run of a DSpark drafter, from a target's folder to the drafter's."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.drafter.methods.dspark import DSparkModel
from paceline.train.checkpoint import Progress
from paceline.train.corpus import Corpus
from paceline.train.drafter import (
    Objective,
    Texts,
    parameters,
    rounds_section,
    train_drafter,
)
from paceline.train.drafter_models import DSparkDrafter
from paceline.train.dspark.objective import BlockDrafter, BlockLoss
from paceline.train.dspark.preset import DSparkPlan, DSparkPreset
from paceline.train.dspark.target import TappedTarget
from paceline.train.heldout import Heldout, write_groups
from paceline.train.identity import begin_run
from paceline.train.loop import Run


def train_dspark(
    target_folder: Path, corpus: Corpus, preset: DSparkPreset, run: Run, out: Path
) -> DSparkModel:
    """Train a drafter for the target in `target_folder`; write its folder and card to `out`.

    Text: `corpus`, and `preset.own_texts` texts that the target writes. The mask token is the
    tokenizer's end of text, which is in the target's embedding and never an anchor. Returns the
    drafter, fp32.

    Raises what `begin_run` raises.
    """
    begin_run(run, out, "dspark", preset, corpus, target=target_folder)
    texts = Texts.load(target_folder, corpus, preset.own_texts, run)
    config = preset.config(target_folder, texts.eos)
    target = TappedTarget(target_folder, run.device, config.taps)
    torch.manual_seed(0)
    model = DSparkModel(config).to(run.device)
    drafter = DSparkDrafter(target_folder, model)
    batches = texts.batches(preset.files)
    loss = BlockLoss(model, target, batches, preset, texts.eos)
    objective = Objective(BlockDrafter(model), loss, preset.muon_rate, preset.adamw_rate)
    plan = DSparkPlan(preset.stages, run.minutes, run.steps, focus=len(texts.own))

    logged = Heldout(
        drafter, texts.decoder, write_groups(texts.decoder, {"held out": texts.heldout})
    )
    notes = {"files": len(texts.trained[: preset.files]), "own_texts": len(texts.own)}
    progress = train_drafter(drafter, objective, batches, plan, run, logged, notes, out)
    if progress is not None:
        splits = {"held out": texts.heldout, "trained on": texts.trained}
        measured = Heldout(drafter, texts.decoder, write_groups(texts.decoder, splits)).measure(out)
        card = _card(model, texts, preset, progress)
        (out / "README.md").write_text(f"{card}\n{rounds_section(measured)}")
    return model


def _card(model: DSparkModel, texts: Texts, preset: DSparkPreset, progress: Progress) -> str:
    return f"""# Paceline demo drafter: {"DSpark" if preset.markov_rank else "DFlash"}

Drafter method `dspark` (DSpark, section 3) for the demo target: drafts a block at a time. It works
with no other model: `config.json` holds the target's fingerprint.

{shape_section(model)}

{texts.card_section(preset.files)}

## Training

{progress.description}: {preset.rows} rows of {preset.length} tokens a step,
{preset.anchors} random blocks in each; from {preset.own_from:.0%} of the time on, only texts that
the target wrote. Weights of the losses: cross-entropy {preset.ce:g}, distance {preset.tv:g},
confidence {preset.certainty:g} (DSpark, section 3.3).
"""


def shape_section(model: DSparkModel) -> str:
    """The list of a model card about a drafter's shape."""
    config = model.config
    heads = "no sequential head and no confidence head: this is DFlash"
    if config.markov_rank:
        confidence = "a confidence head" if config.confidence else "no confidence head"
        heads = f"{config.markov_head} sequential head of rank {config.markov_rank}, {confidence}"
    context = f"the last {config.window} positions" if config.window else "all positions"
    drafted = f"the {config.drafted:,} most frequent" if config.draft_vocab_size else "all"
    return f"""\
- {parameters(model)}, in 8-bit blocks: backbone of {config.layers} layers, width {config.hidden},
  {config.q_heads} heads over {config.kv_heads} KV heads of {config.head_dim}, feed-forward
  {config.intermediate}
- blocks of {config.block} tokens, {config.levels} of them drafted; {heads}
- reads the outputs of target layers {", ".join(map(str, config.taps))} (0 is the first of
  {config.target_layers}) at {context}
- drafts {drafted} of {config.vocab_size:,} tokens; embedding and LM head are the target's and
  not in this folder"""
