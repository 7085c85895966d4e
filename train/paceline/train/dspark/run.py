"""A training run of a DSpark drafter, from a target's folder to the drafter's."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import PartialState

from paceline.drafter.methods.dspark import DSparkConfig, DSparkModel, save_dspark
from paceline.drafter.methods.target import TargetRef
from paceline.train.batches import Batches
from paceline.train.corpus import Corpus
from paceline.train.dspark.card import dspark_card
from paceline.train.dspark.heldout import Heldout
from paceline.train.dspark.objective import BlockDrafter, BlockLoss
from paceline.train.dspark.preset import DSparkPlan, DSparkPreset
from paceline.train.dspark.target import TappedTarget
from paceline.train.identity import begin_run, cleared
from paceline.train.loop import Run, train
from paceline.train.optim import Optimizer
from paceline.train.own_text import authored_texts
from paceline.train.tokenizer import encode_all, load_tokenizer

_PROMPT = 300
"""Tokens of the prompts that are measured on."""

_TEXTS = 24
"""Most texts that are measured on."""


def train_dspark(
    target_folder: Path, corpus: Corpus, preset: DSparkPreset, run: Run, out: Path
) -> DSparkModel:
    """Train a drafter for the target in `target_folder`; write its folder and card to `out`.

    Text: `corpus`, and `preset.own_texts` texts by the target itself, which are kept in `run.work`
    (their time is not part of `run.minutes`). Masks are fed as the tokenizer's end of text, whose
    embedding is there already and never an anchor's. Returns the drafter, fp32.

    Raises what `begin_run` raises.
    """
    begin_run(run, out, "dspark", preset, corpus, target=target_folder)
    tokenizer = load_tokenizer(target_folder)
    trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    eos = tokenizer.eos_token_id
    config = DSparkConfig.for_target(
        target_folder,
        taps=preset.taps,
        block=preset.block,
        mask_token=eos,
        layers=preset.layers,
        window=preset.window,
        markov_rank=preset.markov_rank,
        markov_head=preset.markov_head,
        confidence=preset.confidence,
    )
    target = TappedTarget(target_folder, run.device, config.taps)
    process = PartialState(cpu=torch.device(run.device).type == "cpu")
    with process.main_process_first():  # the others read what the first one wrote
        kept = run.work / "own.safetensors"
        own = authored_texts(target.decoder, trained, preset.own_texts, eos, kept)
    batches = Batches([*own, *trained[: preset.files]], eos)
    torch.manual_seed(0)
    model = DSparkModel(config).to(run.device)
    drafter = BlockDrafter(model)
    loss = BlockLoss(config, target, batches, preset, eos)
    optimizer = Optimizer(drafter, preset.muon_rate, preset.adamw_rate)
    plan = DSparkPlan(preset, run.minutes, run.steps, own=len(own))
    prompts = {
        name: [ids[:_PROMPT] for ids in texts if len(ids) > _PROMPT][:_TEXTS]
        for name, texts in (("held-out", heldout), ("trained-on", trained))
    }
    logged = Heldout(target, prompts["held-out"], eos)
    progress = train(drafter, loss, batches, optimizer, plan, run, lambda _: logged.log(model))
    if not process.is_main_process:
        return model
    notes = {**progress.summary(), "files": len(trained[: preset.files]), "own_texts": len(own)}
    save_dspark(cleared(out), config, model.state_dict(), TargetRef.of(target_folder), notes=notes)
    measured = {name: Heldout(target, part, eos).measure(model) for name, part in prompts.items()}
    parameters = sum(p.numel() for p in model.parameters())
    card = dspark_card(config, corpus, preset, progress, parameters, len(own), measured)
    (out / "README.md").write_text(card)
    return model
