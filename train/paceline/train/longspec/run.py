"""A training run of a LongSpec layer, from a target's folder to a drafter's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState

from paceline.decoder import Decoder
from paceline.drafter.methods.longspec import (
    LongSpecConfig,
    LongSpecModel,
    TargetRef,
    save_longspec,
)
from paceline.train.batches import Batches
from paceline.train.corpus import Corpus
from paceline.train.identity import begin_run, cleared
from paceline.train.longspec.card import longspec_card
from paceline.train.longspec.heldout import Heldout, prompts_of
from paceline.train.longspec.lagged import LaggedLayer
from paceline.train.longspec.objective import LaggedLoss
from paceline.train.longspec.preset import LongSpecPreset, StagePlan
from paceline.train.longspec.target import FrozenTarget
from paceline.train.loop import Run, train
from paceline.train.optim import Optimizer
from paceline.train.own_text import authored_texts
from paceline.train.tokenizer import encode_all, load_tokenizer

_LOGGED_PROMPT = 300  # tokens of the prompts that are measured while training
_CARD_PROMPTS = (300, 1024, 2048, 3840)
_MEASURED_FILES = 12


def train_longspec(
    target_folder: Path, corpus: Corpus, preset: LongSpecPreset, run: Run, out: Path
) -> LongSpecModel:
    """Train a layer for the target in `target_folder` and write its folder and card to `out`.

    Text: `corpus`, and `preset.own_texts` texts by the target itself, which are kept in `run.work`
    (their time is not part of `run.minutes`). Returns the layer, fp32.

    Raises what `begin_run` raises.
    """
    begin_run(run, out, "longspec", preset, corpus, target=target_folder)
    tokenizer = load_tokenizer(target_folder)
    trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    eos = tokenizer.eos_token_id
    process = PartialState(cpu=torch.device(run.device).type == "cpu")
    with process.main_process_first():  # the others read what the first one wrote
        kept = run.work / "own.safetensors"
        own = authored_texts(Decoder.load(target_folder), trained, preset.own_texts, eos, kept)
    batches = Batches([*own, *trained[: preset.files]], eos)
    config = LongSpecConfig.for_target(
        target_folder, window=preset.window, intermediate=preset.intermediate
    )
    torch.manual_seed(0)
    model = LongSpecModel(config).to(run.device)
    layer = LaggedLayer(model)
    plan = StagePlan(preset, run.minutes, run.steps, own=len(own))
    target = FrozenTarget(target_folder, run.device, config.target_layer)
    loss = LaggedLoss(target, batches, preset, plan)
    optimizer = Optimizer(layer, preset.muon_rate, preset.adamw_rate)

    def prompts(documents: Sequence[Sequence[int]], *lengths: int) -> Heldout:
        groups = prompts_of(documents[:_MEASURED_FILES], lengths, config.max_position)
        return Heldout(target_folder, config, groups, preset.levels)

    logged = prompts(heldout, _LOGGED_PROMPT)
    progress = train(
        layer, loss, batches, optimizer, plan, run, lambda _: {"heldout": logged.mean(model)}
    )
    if not process.is_main_process:
        return model
    files = len(trained[: preset.files])
    notes = {**progress.summary(), "files": files, "own_texts": len(own)}
    reference = TargetRef.of(target_folder)
    weights = model.state_dict()
    save_longspec(cleared(out), config, weights, reference, levels=preset.levels, notes=notes)
    measured = {
        split: prompts(part, *_CARD_PROMPTS).measure(model)
        for split, part in (
            ("held-out files", heldout),
            ("files the target was trained on", _known(target_folder, corpus, trained)),
        )
    }
    parameters = sum(each.numel() for each in model.parameters())
    card = longspec_card(config, corpus, preset, progress, parameters, len(own), measured)
    (out / "README.md").write_text(card)
    return model


def _known(target: Path, corpus: Corpus, trained: list[list[int]]) -> list[list[int]]:
    """Those of `trained` that the target's manifest names; none where it has no manifest."""
    manifest = target / "corpus.json"
    if not manifest.is_file():
        return []
    known = {row["sha256"] for row in json.loads(manifest.read_text())["train"]}
    pairs = zip(corpus.train, trained, strict=True)
    return [ids for document, ids in pairs if document.sha256 in known]
