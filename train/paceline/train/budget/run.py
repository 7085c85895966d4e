"""A run that makes a drafter robust to its KV budget, from one drafter's folder to another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import PartialState

from paceline.decoder import Decoder
from paceline.train.batches import Batches
from paceline.train.budget.card import budget_card
from paceline.train.budget.heldout import BudgetHeldout
from paceline.train.budget.preset import BudgetPreset
from paceline.train.budget.students import read_student
from paceline.train.corpus import Corpus
from paceline.train.identity import begin_run, cleared
from paceline.train.longspec.heldout import prompts_of
from paceline.train.loop import Run, train
from paceline.train.optim import Optimizer
from paceline.train.own_text import authored_texts
from paceline.train.schedule import ContinuedPlan
from paceline.train.tokenizer import encode_all, load_tokenizer

_MEASURED_FILES = 4


def train_budget(
    target_folder: Path, start: Path, corpus: Corpus, preset: BudgetPreset, run: Run, out: Path
) -> None:
    """Train the drafter in `start` further, under KV budgets; write its folder and card to `out`.

    `start` is a LongSpec layer or a small language model, made for the target in `target_folder`.
    Text: `corpus`, and `preset.own_texts` texts by the target itself, which are kept in `run.work`
    (their time is not part of `run.minutes`).

    Raises ValueError where the drafter does not fit the target or the preset, and what `begin_run`
    raises.
    """
    begin_run(run, out, "budget", preset, corpus, target=target_folder, start=start)
    tokenizer = load_tokenizer(target_folder)
    trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    eos = tokenizer.eos_token_id
    student = read_student(start, target_folder, run.device)
    process = PartialState(cpu=torch.device(run.device).type == "cpu")
    with process.main_process_first():  # the others read what the first one wrote
        kept = run.work / "own.safetensors"
        own = authored_texts(Decoder.load(target_folder), trained, preset.own_texts, eos, kept)
    batches = Batches([*own, *trained[: preset.files]], eos)
    torch.manual_seed(0)
    loss = student.loss(batches, preset, run.device)
    plan = ContinuedPlan(1, preset.length, preset.warm_up, run.minutes, run.steps)
    optimizer = Optimizer(student.module, preset.muon_rate, preset.adamw_rate)
    measured = BudgetHeldout(student, _prompts(heldout, preset.length))
    progress = train(student.module, loss, batches, optimizer, plan, run, lambda _: measured.log())
    if not process.is_main_process:
        return
    of_preset = asdict(preset)
    chosen = {name: of_preset[name] for name in ("budgets", "weights", "sparse_weight", "policies")}
    student.trained.save(cleared(out), {**progress.summary(), **chosen})
    card = budget_card(
        student.trained.method, start.name, corpus, preset, progress, len(own),
        before=measured.measure(start), after=measured.measure(out),
    )  # fmt: skip
    (out / "README.md").write_text(card)


def _prompts(documents: Sequence[Sequence[int]], length: int) -> dict[str, list[list[int]]]:
    """Short, long, and as long as what was trained on, rows of so many tokens."""
    groups = prompts_of(documents, (length // 16, length // 4, length - 256), length)
    return {name: part[:_MEASURED_FILES] for name, part in groups.items()}
