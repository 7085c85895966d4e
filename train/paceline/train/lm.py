"""Training of the small drafter LM by distillation from a target."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.drafter import Drafter, Resources
from paceline.drafter.methods import method_class
from paceline.drafter.methods.checkpoint import CONFIG_FILE
from paceline.train.batches import Batches
from paceline.train.blocks import store_blocks
from paceline.train.corpus import Corpus, save_tokenizer
from paceline.train.drafters import (
    DrafterModel,
    Heldout,
    Objective,
    Texts,
    rounds_section,
    train_drafter,
    write_groups,
)
from paceline.train.longspec import FrozenTarget
from paceline.train.loop import Loss
from paceline.train.model import (
    LICENCES,
    STDLIB_HEADER,
    build_model,
    load_model,
    schedule_text,
    shape_text,
)
from paceline.train.phases import Phase
from paceline.train.presets import Plan, Preset
from paceline.train.run import PREPARING, Run, begin_run
from paceline.train.trainer import Trainer

_KEPT = 16  # most likely tokens of the target: they have nearly all of its probability
# The first tokens of a window have little context: their predictions come from another window.
_WINDOW, _OVERLAP = 1024, 256


@dataclass
class LmDrafterModel(DrafterModel):
    """A small language model with the tokenizer of the model in `folder`."""

    method = "lm"
    folder: Path

    def save(self, folder: Path, notes: Mapping[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        written: Any = copy.deepcopy(self.model).to(torch.bfloat16)
        written.save_pretrained(folder)
        store_blocks(folder)
        if folder != self.folder:
            save_tokenizer(self.folder, folder)
        if notes:
            config = json.loads((folder / CONFIG_FILE).read_text())
            config["paceline"] = {"method": self.method, "training": dict(notes)}
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    def load_drafter(self, folder: Path, options: Mapping[str, str]) -> Drafter:
        return method_class(self.method).load(folder, options, Resources())


class LmTrainer(Trainer[Preset, LmDrafterModel]):
    """Distils a target into a small language model."""

    method = "lm"

    def read(self, folder: Path, device: str) -> LmDrafterModel:
        model = load_model(folder, torch.float32).to(device)
        return LmDrafterModel(self.target, model, folder)

    def text_loss(
        self, drafter: LmDrafterModel, batches: Batches, plan: Plan, separator: int, device: str
    ) -> tuple[nn.Module, Loss]:
        return drafter.model, _distillation(FrozenTarget(self.target, device, 0), batches)

    def train(self, corpus: Corpus, run: Run, out: Path) -> None:
        """See :func:`train_lm`."""
        train_lm(self.target, corpus, self.preset, run, out)


def train_lm(target_folder: Path, corpus: Corpus, preset: Preset, run: Run, out: Path) -> None:
    """Distil the target in `target_folder` into a small LM of the same tokenizer, written to `out`.

    Text: the first `preset.focus_files` files of `corpus`, and `preset.own_texts` texts that the
    target writes. These and the target's most likely tokens are computed once and kept in
    `run.work`.

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
    documents = [*known, *texts.own]
    stream, file = Batches(documents, texts.eos).stream, run.work / "teacher.safetensors"
    teacher = teacher_of(target, stream, texts.eos, _KEPT, file, run.until(PREPARING))
    ends = np.cumsum([1 + len(ids) for ids in documents])  # each behind a separator
    batches = Batches(documents[: np.searchsorted(ends, len(teacher.ids), "right")], texts.eos)
    model = build_model(preset, texts.eos)
    model.to(torch.device(run.device))  # type: ignore[arg-type]
    drafter = LmDrafterModel(target_folder, model, target_folder)

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


@dataclass(frozen=True)
class Teacher:
    """A target's most likely next tokens at each index of a stream of tokens.

    `ids` int16 [stream, kept] and `weights` fp16 [stream, kept], probabilities that sum to 1 at
    each index. Row i predicts token i + 1.
    """

    ids: Tensor
    weights: Tensor

    def loss(self, logits: Tensor, indices: Tensor) -> Tensor:
        """Cross-entropy in nats of a student against the target, a scalar.

        `logits` is [rows, length, vocabulary], `indices` int64 [rows, length] on the CPU.
        """
        ids = self.ids[indices].to(logits.device, torch.int64)
        weights = self.weights[indices].to(logits.device, torch.float32)
        student = F.log_softmax(logits.float(), dim=-1).gather(-1, ids)
        return -(weights * student).sum(-1).mean()


@torch.no_grad()
def teacher_of(
    target: nn.Module,
    stream: Tensor,
    separator: int,
    kept: int,
    path: Path,
    until: float = math.inf,
) -> Teacher:
    """Compute the `kept` most likely next tokens of `stream` (int64 [tokens]), or read `path`.

    Each document, from its `separator` on, is a text of its own. The result is written to `path`.
    It ends with the document that is read at `until`, on the clock `time.monotonic`.
    Raises ValueError if `path` is about a longer stream.
    """
    if path.is_file():
        tensors = load_file(path)
        if len(tensors["ids"]) > len(stream):
            raise ValueError(
                f"{path} is about {len(tensors['ids'])} tokens, the corpus has {len(stream)}: "
                "remove the file or give another --work"
            )
        return Teacher(tensors["ids"], tensors["weights"])
    ids = torch.zeros(len(stream), kept, dtype=torch.int16)
    weights = torch.zeros(len(stream), kept, dtype=torch.float16)
    device = next(target.parameters()).device
    target.eval()
    phase, done = Phase("running the target, tokens", len(stream), until=until), 0
    for start, keep, end in _windows(stream, separator):
        if start == keep and phase.over:
            break
        tokens = stream[None, start:end].to(device)
        logits = target(input_ids=tokens, use_cache=False).logits[0]
        best = logits.float().softmax(-1).topk(kept)
        ids[keep:end] = best.indices[keep - start :].to("cpu", torch.int16)
        shares = best.values / best.values.sum(-1, keepdim=True)
        weights[keep:end] = shares[keep - start :].to("cpu", torch.float16)
        phase.add(end - keep)
        done = end
    ids, weights = ids[:done].clone(), weights[:done].clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"ids": ids, "weights": weights}, partial)
    os.replace(partial, path)
    return Teacher(ids, weights)


def _windows(stream: Tensor, separator: int) -> list[tuple[int, int, int]]:
    """(start, first index to keep, end) of windows that together keep every index once."""
    starts = [*(stream == separator).nonzero().flatten().tolist(), len(stream)]
    windows = []
    for begin, stop in pairwise(starts):
        keep = begin
        while keep < stop:
            start = max(begin, keep - _OVERLAP)
            end = min(stop, start + _WINDOW)
            windows.append((start, keep, end))
            keep = end
    return windows
