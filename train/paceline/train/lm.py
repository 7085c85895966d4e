"""Training of the small drafter LM by distillation from a target."""

from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.train.batches import Batches
from paceline.train.card import LICENCES, STDLIB_HEADER, schedule_text, shape_text
from paceline.train.corpus import Corpus
from paceline.train.drafter import Objective, Texts, rounds_section, train_drafter
from paceline.train.drafter_models import LmDrafter
from paceline.train.heldout import Heldout, write_groups
from paceline.train.identity import begin_run
from paceline.train.loop import Run
from paceline.train.model import build_model, load_model
from paceline.train.preset import Preset
from paceline.train.teacher import teacher_of

_KEPT = 16  # most likely tokens of the target: they have nearly all of its probability


def train_lm(target_folder: Path, corpus: Corpus, preset: Preset, run: Run, out: Path) -> None:
    """Distil the target in `target_folder` into a small LM of the same tokenizer, written to `out`.

    Text: the first `preset.focus_files` files of `corpus`, and `preset.own_texts` texts that the
    target writes. These and the target's most likely tokens are computed once and kept in
    `run.work`; that is not part of `run.minutes`.

    Raises ValueError if the preset's vocabulary is not the target's, and what `begin_run` raises.
    """
    begin_run(run, out, "lm", preset, corpus, target=target_folder)
    target = load_model(target_folder, torch.bfloat16).to(run.device)
    if target.config.vocab_size != preset.vocabulary:
        raise ValueError(
            f"{target_folder} has a vocabulary of {target.config.vocab_size}, the preset one of "
            f"{preset.vocabulary}: choose a preset with the target's vocabulary"
        )
    texts = Texts.load(target_folder, corpus, preset.own_texts, run)
    known = texts.trained[: preset.focus_files]
    batches = Batches([*known, *texts.own], texts.eos)
    teacher = teacher_of(target, batches.stream, texts.eos, _KEPT, run.work / "teacher.safetensors")
    model = build_model(preset, texts.eos)
    model.to(torch.device(run.device))  # type: ignore[arg-type]
    drafter = LmDrafter(target_folder, model, target_folder)

    def loss(forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        tokens = batches.stream[indices[:, :-1]].to(run.device)
        logits = forward(input_ids=tokens, use_cache=False).logits
        return teacher.loss(logits, indices[:, :-1])

    objective = Objective(model, loss, preset.muon_rate, preset.adamw_rate)
    plan = preset.plan(run.minutes, run.steps)
    splits = {"held out": texts.heldout, "trained on": known}
    heldout = Heldout(drafter, texts.decoder, write_groups(texts.decoder, splits))
    notes = {"files": len(known), "own_texts": len(texts.own)}
    progress = train_drafter(drafter, objective, batches, plan, run, heldout, notes, out)
    if progress is None:
        return
    header = STDLIB_HEADER if corpus.is_stdlib else ""
    card = f"""{header}# Paceline demo drafter LM

A tiny Llama-type language model that drafts for the demo target (drafter method `lm`). Its own text
is not meant to be read.

{shape_text(preset, model)}
{texts.card_section(preset.focus_files)}
{LICENCES[corpus.is_stdlib]}

## Training

Distilled: cross-entropy against the target's distribution over its {_KEPT} most likely next tokens;
{objective.rates}.
{schedule_text(preset, progress)}
{rounds_section(heldout.measure(out))}"""
    (out / "README.md").write_text(card)
