"""Training of a target model: tokenizer, model, loop, card."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline.train.batches import Batches
from paceline.train.card import Facts, target_card
from paceline.train.checkpoint import earlier_runs, save_model, write_runs
from paceline.train.corpus import Corpus
from paceline.train.evaluate import next_token_loss, text_loss
from paceline.train.identity import begin_run
from paceline.train.loop import Run, train
from paceline.train.measure import EARLY, HELDOUT, TRAINED, measure_target
from paceline.train.model import build_model
from paceline.train.optim import Optimizer
from paceline.train.preset import Preset
from paceline.train.prompts import Prompt
from paceline.train.schedule import Schedule
from paceline.train.tokenizer import encode_all, load_tokenizer, train_tokenizer
from paceline.train.unlikelihood import Unlikelihood

_HELDOUT_TOKENS = 2048  # tokens of each held-out file read at a checkpoint


def train_target(
    corpus: Corpus,
    preset: Preset,
    run: Run,
    out: Path,
    prompts: Sequence[Prompt] = (),
    start: Path | None = None,
) -> LlamaForCausalLM:
    """Train a tokenizer and a target on `corpus`; write an HF model folder with a card to `out`.

    The tokenizer is kept beside the checkpoints in `run.work`, so that a resumed run uses the
    same one. The card measures repetition on `prompts`. With `start`, a model folder, training
    begins with its weights and tokenizer. Returns the model, in bf16.

    Raises OSError if `start` holds no model, RuntimeError if it is of another shape, and what
    `begin_run` raises.
    """
    begin_run(run, out, "target", preset, corpus, start=start)
    kept = run.work / "tokenizer"
    if (kept / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(kept)
    elif start is not None:
        tokenizer = load_tokenizer(start)
        tokenizer.save_pretrained(kept)
    else:
        read = (document.text for document in corpus.train)
        tokenizer = train_tokenizer(read, preset.vocabulary, preset.context)
        tokenizer.save_pretrained(kept)
    trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    batches = Batches(trained, tokenizer.eos_token_id, copied=preset.copy_share)
    stream = batches.stream.to(run.device)
    model = build_model(preset, tokenizer.eos_token_id)
    model.to(torch.device(run.device))  # type: ignore[arg-type]
    runs = []
    if start is not None:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(start).state_dict())
        runs = earlier_runs(start)

    unlikelihood = Unlikelihood(trained, tokenizer.eos_token_id, preset.unlikely_share)

    def loss(forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        likelihood = next_token_loss(forward, stream[indices.to(run.device)])
        return likelihood + unlikelihood(model, batches.position.documents)

    def heldout_loss(measured: nn.Module) -> dict[str, float]:
        return {"heldout": text_loss(measured, [ids[:_HELDOUT_TOKENS] for ids in heldout])}

    plan = Schedule(preset, run.minutes, run.steps)
    optimizer = Optimizer(model, preset.muon_rate, preset.adamw_rate)
    progress = train(model, loss, batches, optimizer, plan, run, heldout_loss)
    model = save_model(out, model, tokenizer)
    corpus.write_manifest(out / "corpus.json")
    runs.append(progress.summary())
    write_runs(out, runs)
    focus = preset.focus_files or len(trained)
    texts = {TRAINED: trained[:focus], EARLY: trained[focus:], HELDOUT: heldout}
    measured = measure_target(model, tokenizer, texts, prompts)
    facts = Facts(model, corpus, preset, runs, len(stream))
    (out / "README.md").write_text(target_card(facts, measured))
    return model
