"""A run that trains a drafter further on recorded texts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from paceline.decoder import weights_fingerprint
from paceline.drafter.methods.base import LoadError
from paceline.drafter.recordings import Recording, read_recordings
from paceline.train.batches import Batches
from paceline.train.corpus import Corpus
from paceline.train.drafters import (
    Heldout,
    Objective,
    Texts,
    accepted_length,
    drafter_method,
    train_drafter,
    write_after,
)
from paceline.train.presets import OnlinePreset, Plan, Stage
from paceline.train.recipes import recipe_of
from paceline.train.run import Run, begin_run

TRAINED_FILE, HELDOUT_FILE = "recorded.jsonl", "heldout.jsonl"
"""The two parts, in a run's work folder."""

_HELDOUT = 8
"""One of this many prompts is held out."""

RECORDED, OLD = "recorded", "old"
"""Groups of held-out texts: recorded ones, and texts of the kind the drafter was made with."""

_PROMPT = 300  # tokens of the prompts of old texts
_OLD_TEXTS = 12  # at each temperature
_FINAL_RATE = 0.05


@dataclass(frozen=True)
class RecordedTexts:
    """Two parts of the texts of a folder, no prompt in both."""

    trained: Sequence[Recording]
    heldout: Sequence[Recording]


def recorded_texts(folder: Path, target: Path, work: Path) -> RecordedTexts:
    """The texts of a recorder's folder by the model in `target` or by an unknown target.

    They are copied to `work` and read from there next time: a resumed run reads the texts it began
    with. Whether a text is held out depends on its prompt alone, in every run.

    Raises ValueError if there are too few texts, or they cannot be read.
    """
    kept = work / TRAINED_FILE, work / HELDOUT_FILE
    try:
        if not all(file.is_file() for file in kept):
            fingerprint = weights_fingerprint(target)
            texts = [t for t in read_recordings(folder) if t.target in ("", fingerprint)]
            parts = _split(_whole(texts))
            if not all(parts):
                raise ValueError(
                    f"{folder} has {len(texts)} texts by this target, {len(parts[1])} of them with "
                    f"a prompt to hold out: record more, of different prompts"
                )
            work.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file, part in zip(kept, parts, strict=True):
                _write(file, part)
        return RecordedTexts(*(read_recordings(file) for file in kept))
    except LoadError as error:
        raise ValueError(str(error)) from error


def _whole(texts: Iterable[Recording]) -> list[Recording]:
    """Texts without those that are a prefix of another: a generation resumed after a failure."""
    by_ids = {text.prompt + text.tokens: text for text in texts}
    # In this order a text comes right before the first that begins with it.
    ordered = sorted(by_ids)
    begun = {ids for ids, after in pairwise(ordered) if after[: len(ids)] == ids}
    return [by_ids[ids] for ids in ordered if ids not in begun]


def _split(texts: Iterable[Recording]) -> tuple[list[Recording], list[Recording]]:
    trained, heldout = list[Recording](), list[Recording]()
    for text in texts:
        digest = hashlib.sha256(str(text.prompt).encode()).digest()
        (trained if digest[0] % _HELDOUT else heldout).append(text)
    return trained, heldout


def _write(file: Path, texts: Iterable[Recording]) -> None:
    """Write a file atomically, readable by its owner only, as the recorder's own files."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as lines:
        lines.writelines(text.to_json() + "\n" for text in texts)
    os.replace(partial, file)


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

    `start` is a drafter of a method whose recipe has rates for it, made for the target in
    `target_folder`; `recordings` is the folder of a drafter service's `--record`. Besides
    the recorded texts, texts that the target writes and files of `corpus` are read, against
    forgetting. Copies of the recorded texts are kept in `run.work`.

    Raises ValueError if the drafter does not fit the target, its method is not trained on recorded
    texts, or there are too few texts, and what `begin_run` raises.
    """
    begin_run(
        run, out, "online", preset, corpus, target=target_folder, start=start, recordings=recordings
    )
    method = drafter_method(start, target_folder)
    recipe = recipe_of(method)
    if recipe is None or (rates := recipe.online) is None:
        raise ValueError(
            f"{start} is a drafter of method {method!r}, which is not trained on recorded texts"
        )
    trainer = recipe.load_trainer(target_folder, recipe.presets[recipe.preset])
    drafter = trainer.read(start, run.device)
    recorded = recorded_texts(recordings, target_folder, run.work)
    texts = Texts.load(target_folder, corpus, preset.old_texts if preset.old_share else 0, run)
    new = [[*text.prompt, *text.tokens] for text in recorded.trained]
    total = sum(map(len, new))
    old_tokens = round(total * preset.old_share / (1 - preset.old_share))
    old = first_tokens([*texts.own, *texts.trained], old_tokens)
    batches = Batches([*new, *old], texts.eos)
    torch.manual_seed(0)
    stage = Stage("recorded", 1.0, rates.rows, preset.length, offset=True)
    plan = Plan((stage,), run.minutes, run.steps, 0, preset.warm_up, _FINAL_RATE)
    module, loss = trainer.text_loss(drafter, batches, plan, texts.eos, run.device)
    objective = Objective(module, loss, rates.muon_rate, rates.adamw_rate)
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
