"""Training of the small drafter LM by distillation from a target."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline.train.batches import Batches
from paceline.train.card import Facts, drafter_card
from paceline.train.checkpoint import save_model
from paceline.train.corpus import Corpus
from paceline.train.drafter import Texts
from paceline.train.identity import begin_run
from paceline.train.loop import Run, train
from paceline.train.measure import HELDOUT, TRAINED, measure_drafter
from paceline.train.model import build_model
from paceline.train.optim import Optimizer
from paceline.train.preset import Preset
from paceline.train.prompts import Prompt
from paceline.train.schedule import Schedule
from paceline.train.teacher import teacher_of
from paceline.train.tokenizer import load_tokenizer

_KEPT = 16  # most likely tokens of the target: they have nearly all of its probability


def train_lm(
    target_folder: Path,
    corpus: Corpus,
    preset: Preset,
    run: Run,
    out: Path,
    prompts: Sequence[Prompt] = (),
) -> LlamaForCausalLM:
    """Distil the target in `target_folder` into a small LM of the same tokenizer, written to `out`.

    Text: the first `preset.focus_files` files of `corpus`, and `preset.own_texts` texts that the
    target writes. These and the target's most likely tokens are computed once and kept in
    `run.work`; that is not part of `run.minutes`. The card measures on `prompts`. Returns the
    model, in bf16.

    Raises ValueError if the preset's vocabulary is not the target's, and what `begin_run` raises.
    """
    begin_run(run, out, "lm", preset, corpus, target=target_folder)
    target = LlamaForCausalLM.from_pretrained(target_folder)
    target.to(torch.device(run.device))  # type: ignore[arg-type]
    if target.config.vocab_size != preset.vocabulary:
        raise ValueError(
            f"{target_folder} has a vocabulary of {target.config.vocab_size}, the preset one of "
            f"{preset.vocabulary}: choose a preset with the target's vocabulary"
        )
    tokenizer = load_tokenizer(target_folder)
    texts = Texts.load(target_folder, corpus, preset.own_texts, run)
    known = texts.trained[: preset.focus_files]
    batches, eos = Batches([*known, *texts.own], texts.eos), texts.eos
    teacher = teacher_of(target, batches.stream, eos, _KEPT, run.work / "teacher.safetensors")
    model = build_model(preset, eos)
    model.to(torch.device(run.device))  # type: ignore[arg-type]

    def loss(forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        tokens = batches.stream[indices[:, :-1]].to(run.device)
        logits = forward(input_ids=tokens, use_cache=False).logits
        return teacher.loss(logits, indices[:, :-1])

    plan = Schedule(preset, run.minutes, run.steps)
    optimizer = Optimizer(model, preset.muon_rate, preset.adamw_rate)
    progress = train(model, loss, batches, optimizer, plan, run)
    model = save_model(out, model, tokenizer)
    splits = {TRAINED: known, HELDOUT: texts.heldout}
    measured = measure_drafter(model, target, tokenizer, splits, prompts)
    facts = Facts(model, corpus, preset, [progress.summary()], len(batches.stream))
    (out / "README.md").write_text(drafter_card(facts, measured))
    return model
