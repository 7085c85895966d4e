"""A run that trains a drafter further on recorded texts, from one folder to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState

from paceline.decoder import Decoder
from paceline.train.batches import Batches
from paceline.train.corpus import Corpus
from paceline.train.identity import begin_run, cleared
from paceline.train.loop import Run, train
from paceline.train.online.card import online_card
from paceline.train.online.heldout import OnlineHeldout
from paceline.train.online.learners import read_learner
from paceline.train.online.preset import OnlinePreset
from paceline.train.online.texts import recorded_texts
from paceline.train.optim import Optimizer
from paceline.train.own_text import authored_texts
from paceline.train.schedule import ContinuedPlan
from paceline.train.tokenizer import encode_all, load_tokenizer


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
    `target_folder`; `recordings` is the folder of a drafter service's `--record`. Along with these
    texts others are read, by the target itself and from `corpus`, so that nothing is unlearnt. What
    was recorded, and what the target writes, is kept in `run.work`.

    Raises ValueError where the drafter does not fit the target or there are too few texts, and what
    `begin_run` raises.
    """
    begin_run(
        run, out, "online", preset, corpus, target=target_folder, start=start, recordings=recordings
    )
    learner = read_learner(start, target_folder, run.device)
    method = learner.trained.method
    process = PartialState(cpu=torch.device(run.device).type == "cpu")
    tokenizer = load_tokenizer(target_folder)
    known, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    eos = tokenizer.eos_token_id
    with process.main_process_first():  # the others read what the first one wrote
        texts = recorded_texts(recordings, target_folder, run.work)
        kept = run.work / "own.safetensors"
        count = preset.old_texts if preset.old_share else 0
        own = authored_texts(Decoder.load(target_folder), known, count, eos, kept)
    recorded = [[*text.prompt, *text.tokens] for text in texts.trained]
    total = sum(map(len, recorded))
    old = first_tokens([*own, *known], round(total * preset.old_share / (1 - preset.old_share)))
    batches = Batches([*recorded, *old], eos)
    torch.manual_seed(0)
    plan = ContinuedPlan(preset.rows[method], preset.length, preset.warm_up, run.minutes, run.steps)
    loss = learner.loss(batches, plan, eos, run.device)
    optimizer = Optimizer(learner.module, preset.muon_rate[method], preset.adamw_rate[method])
    measured = OnlineHeldout(learner.trained, texts.heldout, heldout, eos)
    progress = train(learner.module, loss, batches, optimizer, plan, run, lambda _: measured.log())
    if not process.is_main_process:
        return
    facts: dict[str, str | int] = {
        "from": start.name,
        "recorded_texts": len(recorded),
        "recorded_tokens": total,
        "old_tokens": sum(map(len, old)),
    }
    before = measured.measure(start)
    learner.trained.save(cleared(out), {**progress.summary(), **facts})
    card = online_card(method, facts, corpus, preset, progress, before, measured.measure(out))
    (out / "README.md").write_text(card)


def first_tokens(documents: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """`count` tokens from the start of a list of documents, the last one cut."""
    taken, left = list[Sequence[int]](), count
    for ids in documents:
        if left <= 0:
            break
        taken.append(ids[:left])
        left -= len(ids)
    return taken
