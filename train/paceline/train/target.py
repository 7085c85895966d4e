"""Training of a target model: tokenizer, model, loop, measurements, card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.decoder import Decoder
from paceline.kernels.sampling import SamplingParams
from paceline.train.batches import Batches
from paceline.train.corpus import Corpus, Documents, encode_all, train_tokenizer
from paceline.train.loop import Optimizer, train
from paceline.train.model import (
    LICENCES,
    STDLIB_HEADER,
    build_model,
    distinct_ngrams,
    next_token_loss,
    save_model,
    schedule_text,
    shape_text,
    text_loss,
)
from paceline.train.own_text import PROMPT, Task, random_prompts, until, write_texts
from paceline.train.presets import Preset
from paceline.train.run import Progress, Run, begin_run

_HELDOUT_TOKENS = 2048  # tokens of each held-out file read at a checkpoint

GENERATED_TOKENS = 256

# Splits of text: trained on to the end, in the first part of the run only, never.
TRAINED, EARLY, HELDOUT = "trained", "early", "heldout"
_FILE_TOKENS = 2048  # of each measured file, from its start
_FILES = 12
_TEXTS = 32
_LONG_FILES = 4  # that fill the context: attention is slow on these

_SPLITS = {
    TRAINED: "files trained on to the end",
    EARLY: "files trained on at first",
    HELDOUT: "held-out files",
}


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
    measured = measure_target(model, Decoder.load(out), tokenizer.eos_token_id, texts)
    card = target_card(model, corpus, preset, progress, len(stream), measured)
    (out / "README.md").write_text(card)
    return model


@dataclass(frozen=True)
class TargetNumbers:
    """Loss per split in nats per token, and repetition in greedy texts."""

    loss: dict[str, float]  # in windows of 1024 tokens
    # In windows of the whole context; only splits with files that fill it.
    long_loss: dict[str, float]
    # Median share of distinct 4-grams in greedy texts from 32 random positions, per split.
    distinct: dict[str, float]


def measure_target(
    model: Any, decoder: Decoder, eos: int, texts: Mapping[str, Documents]
) -> TargetNumbers:
    """Measure a target, given as an HF model and as a decoder. Takes a minute or two on a CPU.

    `texts` are token ids per split.
    """
    context = model.config.max_position_embeddings
    long_loss, distinct = {}, {}
    for split, files in texts.items():
        if filling := [ids[: context + 1] for ids in files if len(ids) > context]:
            long_loss[split] = text_loss(model, filling[:_LONG_FILES], context)
        if any(len(ids) >= PROMPT for ids in files):
            prompts = random_prompts(files, _TEXTS, np.random.default_rng(0))
            tasks = [Task(ids, SamplingParams(temperature=0), GENERATED_TOKENS) for ids in prompts]
            written = write_texts(decoder, tasks, eos)
            distinct[split] = median(distinct_ngrams(until(eos, text)) for _, text in written)
    loss = {name: text_loss(model, part) for name, part in _sample(texts).items()}
    return TargetNumbers(loss, long_loss, distinct)


def _sample(texts: Mapping[str, Documents]) -> dict[str, list[Sequence[int]]]:
    """The start of a few files of each split that has any, spread evenly over the split."""
    return {
        split: [ids[:_FILE_TOKENS] for ids in files[:: max(1, len(files) // _FILES)][:_FILES]]
        for split, files in texts.items()
        if files
    }


def target_card(
    model: nn.Module,
    corpus: Corpus,
    preset: Preset,
    progress: Progress,
    tokens: int,
    numbers: TargetNumbers,
) -> str:
    """The README.md of a target's folder; `tokens` is the length of the training text."""
    losses = "\n".join(
        f"| {_SPLITS[s]} | {value:.2f} | {_shown(numbers.long_loss.get(s))} |"
        for s, value in numbers.loss.items()
    )
    distinct = "\n".join(f"| {_SPLITS[s]} | {value:.2f} |" for s, value in numbers.distinct.items())
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

| text | loss, nats per token, windows of 1024 tokens | windows of {preset.context} |
| --- | --- | --- |
{losses}

The gap between the first row and the last is memorisation: drafting text from files trained on is
much easier than drafting other text, so state which kind a measurement used.
Where the second number is higher, the model is worse at late positions.

Median share of distinct 4-grams in greedy texts of {GENERATED_TOKENS} tokens after 32 random
positions (1: nothing repeats; text caught in a loop of one line falls below 0.3):

| positions in | distinct 4-grams |
| --- | --- |
{distinct}
"""


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
