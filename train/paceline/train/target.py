"""Training of a target model: tokenizer, model, loop, card."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline.decoder import Decoder
from paceline.train.batches import Batches
from paceline.train.card import target_card
from paceline.train.checkpoint import save_model
from paceline.train.corpus import Corpus
from paceline.train.evaluate import next_token_loss, text_loss
from paceline.train.identity import begin_run
from paceline.train.loop import Run, train
from paceline.train.measure import EARLY, HELDOUT, TRAINED, measure_target
from paceline.train.model import build_model
from paceline.train.optim import Optimizer
from paceline.train.preset import Preset
from paceline.train.tokenizer import encode_all, load_tokenizer, train_tokenizer

_HELDOUT_TOKENS = 2048  # tokens of each held-out file read at a checkpoint


def train_target(corpus: Corpus, preset: Preset, run: Run, out: Path) -> LlamaForCausalLM:
    """Train a tokenizer and a target on `corpus`; write an HF model folder with a card to `out`.

    The tokenizer is kept beside the checkpoints in `run.work`, so that a resumed run uses the
    same one. Returns the model, in bf16. Raises what `begin_run` raises.
    """
    begin_run(run, out, "target", preset, corpus)
    kept = run.work / "tokenizer"
    if (kept / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(kept)
    else:
        read = (document.text for document in corpus.train)
        tokenizer = train_tokenizer(read, preset.vocabulary, preset.context)
        tokenizer.save_pretrained(kept)
    trained, heldout = (encode_all(tokenizer, part) for part in (corpus.train, corpus.heldout))
    batches = Batches(trained, tokenizer.eos_token_id, copied=preset.copy_share)
    stream = batches.stream.to(run.device)
    model = build_model(preset, tokenizer.eos_token_id)
    model.to(torch.device(run.device))  # type: ignore[arg-type]

    def loss(forward: nn.Module, indices: Tensor, done: float) -> Tensor:
        return next_token_loss(forward, stream[indices.to(run.device)])

    def heldout_loss(measured: nn.Module) -> dict[str, float]:
        return {"heldout": text_loss(measured, [ids[:_HELDOUT_TOKENS] for ids in heldout])}

    optimizer = Optimizer(model, preset.muon_rate, preset.adamw_rate)
    progress = train(
        model, loss, batches, optimizer, preset.plan(run.minutes, run.steps), run, heldout_loss
    )
    model = save_model(out, model, tokenizer)
    corpus.write_manifest(out / "corpus.json")
    focus = preset.focus_files or len(trained)
    texts = {TRAINED: trained[:focus], EARLY: trained[focus:], HELDOUT: heldout}
    measured = measure_target(model, Decoder.load(out), tokenizer.eos_token_id, texts)
    card = target_card(model, corpus, preset, progress, len(stream), measured)
    (out / "README.md").write_text(card)
    return model
