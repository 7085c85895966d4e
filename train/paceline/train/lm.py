"""Training of the small drafter LM: the shape of a target, taught by one."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline.train.batches import Batches
from paceline.train.card import Facts, drafter_card
from paceline.train.checkpoint import save_model
from paceline.train.corpus import Corpus
from paceline.train.identity import begin_run
from paceline.train.loop import Run, train
from paceline.train.measure import HELDOUT, TRAINED, measure_drafter
from paceline.train.model import build_model
from paceline.train.optim import Optimizer
from paceline.train.own_text import own_texts
from paceline.train.preset import Preset
from paceline.train.prompts import Prompt
from paceline.train.schedule import Schedule
from paceline.train.teacher import opinions_of
from paceline.train.tokenizer import encode_all, load_tokenizer

_KEPT = 16  # of the target's next tokens: they hold nearly all of its probability


def train_lm(
    target_folder: Path,
    corpus: Corpus,
    preset: Preset,
    run: Run,
    out: Path,
    prompts: Sequence[Prompt] = (),
) -> LlamaForCausalLM:
    """Distil the target in `target_folder` into a small LM of the same tokenizer, written to `out`.

    The text is the first `preset.focus_files` files of `corpus` and `preset.own_texts` texts that
    the target writes itself. These, and what the target thinks of it all, are computed once and
    kept in `run.work`; the time that takes is not part of `run.minutes`. `prompts` are what the
    card measures on. Returns the model, in bf16.

    Raises ValueError where the preset's vocabulary is not the target's, and what `begin_run`
    raises.
    """
    begin_run(run, out, "lm", preset, corpus, target=target_folder)
    tokenizer = load_tokenizer(target_folder)
    target = LlamaForCausalLM.from_pretrained(target_folder)
    target.to(torch.device(run.device))  # type: ignore[arg-type]
    if target.config.vocab_size != preset.vocabulary:
        raise ValueError(
            f"{target_folder} has a vocabulary of {target.config.vocab_size}, the preset one of "
            f"{preset.vocabulary}: choose a preset with the target's vocabulary"
        )
    trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    eos = tokenizer.eos_token_id
    known = trained[: preset.focus_files]
    written = own_texts(target, trained, preset.own_texts, eos, run.work / "own.safetensors")
    batches = Batches(known + written, eos)
    opinions = opinions_of(target, batches.stream, eos, _KEPT, run.work / "opinions.safetensors")
    model = build_model(preset, eos)
    model.to(torch.device(run.device))  # type: ignore[arg-type]

    def loss(forward: nn.Module, places: Tensor, done: float) -> Tensor:
        tokens = batches.stream[places[:, :-1]].to(run.device)
        logits = forward(input_ids=tokens, use_cache=False).logits
        return opinions.loss(logits, places[:, :-1])

    plan = Schedule(preset, run.minutes, run.steps)
    optimizer = Optimizer(model, preset.muon_rate, preset.adamw_rate)
    progress = train(model, loss, batches, optimizer, plan, run)
    model = save_model(out, model, tokenizer)
    texts = {TRAINED: known, HELDOUT: heldout}
    measured = measure_drafter(model, target, tokenizer, texts, prompts)
    facts = Facts.collect(model, corpus, preset, [progress.summary()], len(batches.stream))
    (out / "README.md").write_text(drafter_card(facts, measured))
    return model
