"""The numbers a model card states, all measured on the weights as they ship."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from paceline.train.evaluate import (
    Documents,
    agreement,
    continuation,
    distinct_ngrams,
    text_loss,
    top1_hits,
)
from paceline.train.own_text import PROMPT, random_prompts, until, write
from paceline.train.prompts import Prompt

GENERATED_TOKENS = 256
TRAINED, EARLY, HELDOUT = "trained", "early", "heldout"
"""Splits of text: trained on to the end, in the first part of the run only, never."""
_FILE_TOKENS = 2048  # of each measured file, from its start
_FILES = 12
_LONG_FILES = 4  # that fill the context: attention makes these dear


@dataclass(frozen=True)
class Repetition:
    """Share of distinct 4-grams in the text after one prompt, greedy and at temperature 0.8."""

    prompt: str
    split: str
    greedy: float
    sampled: float


@dataclass(frozen=True)
class TargetNumbers:
    """Loss per split in nats per token, and repetition per prompt and at random places."""

    loss: dict[str, float]
    """In windows of 1024 tokens."""
    long_loss: dict[str, float]
    """In windows of the whole context, of files that fill it; splits without such files lack."""
    repetition: list[Repetition]
    anywhere: dict[str, float]
    """Median share of distinct 4-grams in greedy texts from 32 random places, per split."""


@dataclass(frozen=True)
class DrafterNumbers:
    """Loss, top-1 agreement with the target and overlap with its distribution, per split."""

    loss: dict[str, float]
    top1: dict[str, float]
    overlap: dict[str, float]
    generated_top1: dict[str, float]
    """Share of the target's own greedy tokens ranked first, per split of the prompts before."""


def measure_target(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Documents],
    prompts: Sequence[Prompt],
) -> TargetNumbers:
    """Measure an HF target; `texts` are token ids per split. Takes a minute or two on a CPU."""
    loss = {name: text_loss(model, part) for name, part in _sample(texts).items()}
    context: int = model.config.max_position_embeddings
    filling = {
        split: [ids for ids in files if len(ids) > context] for split, files in texts.items()
    }
    long_loss = {
        split: text_loss(model, [ids[: context + 1] for ids in files[:_LONG_FILES]], context)
        for split, files in filling.items()
        if files
    }
    repetition = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        greedy, sampled = (
            distinct_ngrams(continuation(model, ids, GENERATED_TOKENS, heat)) for heat in (0, 0.8)
        )
        repetition.append(Repetition(prompt.id, prompt.split, greedy, sampled))
    anywhere = {
        split: _median_distinct(model, files, tokenizer.eos_token_id)
        for split, files in texts.items()
        if any(len(ids) >= PROMPT for ids in files)
    }
    return TargetNumbers(loss, long_loss, repetition, anywhere)


def _median_distinct(model: Any, documents: Documents, separator: int) -> float:
    prompts = random_prompts(documents, np.random.default_rng(0))
    texts = write(model, prompts, separator, greedy=True, length=PROMPT + GENERATED_TOKENS)
    return median(distinct_ngrams(until(separator, ids)) for ids in texts[:, PROMPT:].tolist())


def measure_drafter(
    model: Any,
    target: Any,
    tokenizer: Any,
    texts: Mapping[str, Documents],
    prompts: Sequence[Prompt],
) -> DrafterNumbers:
    """Measure how well an HF language model guesses what `target` says next."""
    parts = _sample(texts)
    loss = {name: text_loss(model, part) for name, part in parts.items()}
    alike = {name: agreement(model, target, part) for name, part in parts.items()}
    return DrafterNumbers(
        loss,
        top1={name: top1 for name, (top1, _) in alike.items()},
        overlap={name: overlap for name, (_, overlap) in alike.items()},
        generated_top1=_generated_agreement(model, target, tokenizer, prompts),
    )


def _generated_agreement(
    model: Any, target: Any, tokenizer: Any, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Share of greedy tokens of `target` that `model` ranks first, given all before, per split."""
    hits: dict[str, list[bool]] = {}
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        written = continuation(target, ids, GENERATED_TOKENS)
        found = top1_hits(model, ids + written, len(written))
        hits.setdefault(prompt.split, []).extend(found)
    return {split: mean(found) for split, found in hits.items()}


def _sample(texts: Mapping[str, Documents]) -> dict[str, list[Sequence[int]]]:
    """The start of a few files of each split that has any, spread evenly over the split."""
    return {
        split: [ids[:_FILE_TOKENS] for ids in files[:: max(1, len(files) // _FILES)][:_FILES]]
        for split, files in texts.items()
        if files
    }
