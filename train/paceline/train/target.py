"""Training of a target model: tokenizer, model, loop, measurements, card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.train.batches import Batches
from paceline.train.corpus import Corpus, Documents, encode_all, train_tokenizer
from paceline.train.loop import Optimizer, train
from paceline.train.model import (
    LICENCES,
    STDLIB_HEADER,
    build_model,
    next_token_loss,
    save_model,
    schedule_text,
    shape_text,
    text_loss,
)
from paceline.train.presets import Preset
from paceline.train.run import Progress, Run, begin_run

_HELDOUT_TOKENS = 2048  # tokens of each held-out file read at a checkpoint
_FILE_TOKENS, _FILES = 2048, 12  # files of a split that are measured, and their tokens

# Splits of text: trained on to the end, in the first part of the run only, never.
TRAINED, EARLY = "files trained on to the end", "files trained on at first"
HELDOUT = "held-out files"


def train_target(corpus: Corpus, preset: Preset, run: Run, out: Path) -> LlamaForCausalLM:
    """Train a tokenizer and a target on `corpus`; write an HF model folder with a card to `out`.

    The tokenizer is kept beside the checkpoints in `run.work`, so that a resumed run uses the
    same one. Returns the model, in bf16. Raises what `begin_run` raises.
    """
    begin_run(run, out, "target", preset, corpus)
    kept = run.work / "tokenizer"
    if (kept / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(kept)
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
    losses = measure_target(model, texts)
    card = target_card(model, corpus, preset, progress, len(stream), losses)
    (out / "README.md").write_text(card)
    return model


def measure_target(model: Any, texts: Mapping[str, Documents]) -> dict[str, float]:
    """Return the loss in windows of 1024 tokens by split, for a few files spread evenly over each.

    `texts` are token ids per split.
    """
    return {
        split: text_loss(
            model, [ids[:_FILE_TOKENS] for ids in files[:: max(1, len(files) // _FILES)][:_FILES]]
        )
        for split, files in texts.items()
        if files
    }


def target_card(
    model: nn.Module, corpus: Corpus, preset: Preset, progress: Progress, tokens: int,
    losses: Mapping[str, float],
) -> str:  # fmt: skip
    """The README.md of a target's folder; `tokens` is the length of the training text."""
    rows = "\n".join(f"| {split} | {loss:.2f} |" for split, loss in losses.items())
    return f"""{STDLIB_HEADER if corpus.is_stdlib else ""}# Paceline demo target

A small Llama-type language model that writes Python source. It exists so that speculative
decoding can be shown and measured on a laptop with no download. It was trained on its corpus alone,
and has memorised parts of it; use it for nothing else.

{shape_text(preset, model)}
## Data and licence

{len(corpus.train)} files of the {corpus.source}: {tokens:,} tokens.
{len(corpus.heldout)} files are held out. `corpus.json` lists all files with digests.
{LICENCES[corpus.is_stdlib]}

## Training

Muon for the matrices of the layers, AdamW for the rest, bf16 autocast, constant learning rates
and then a linear fall.
{schedule_text(preset, progress)}
## Measured

| text | loss, nats per token, windows of 1024 tokens |
| --- | --- |
{rows}

The gap between the first row and the last is memorisation: drafting text from files trained on is
much easier than drafting other text, so state which kind a measurement used.
"""
