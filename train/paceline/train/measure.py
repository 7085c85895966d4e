"""The measurements of a model card, on the weights as they are saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.train.evaluate import Documents, distinct_ngrams, text_loss
from paceline.train.own_text import PROMPT, random_prompts, until, write
from paceline.train.prompts import Prompt

GENERATED_TOKENS = 256
TRAINED, EARLY, HELDOUT = "trained", "early", "heldout"
"""Splits of text: trained on to the end, in the first part of the run only, never."""
_FILE_TOKENS = 2048  # of each measured file, from its start
_FILES = 12
_LONG_FILES = 4  # that fill the context: attention is slow on these


@dataclass(frozen=True)
class Repetition:
    """Share of distinct 4-grams in the text after one prompt, greedy and at temperature 0.8."""

    prompt: str
    split: str
    greedy: float
    sampled: float


@dataclass(frozen=True)
class TargetNumbers:
    """Loss per split in nats per token, and repetition per prompt and at random positions."""

    loss: dict[str, float]
    """In windows of 1024 tokens."""
    long_loss: dict[str, float]
    """In windows of the whole context; only splits with files that fill it."""
    repetition: list[Repetition]
    anywhere: dict[str, float]
    """Median share of distinct 4-grams in greedy texts from 32 random positions, per split."""


def measure_target(
    model: Any, tokenizer: Any, texts: Mapping[str, Documents], prompts: Sequence[Prompt]
) -> TargetNumbers:
    """Measure an HF target; `texts` are token ids per split. Takes a minute or two on a CPU."""
    eos, context = tokenizer.eos_token_id, model.config.max_position_embeddings
    long_loss, anywhere = {}, {}
    for split, files in texts.items():
        if filling := [ids[: context + 1] for ids in files if len(ids) > context]:
            long_loss[split] = text_loss(model, filling[:_LONG_FILES], context)
        if any(len(ids) >= PROMPT for ids in files):
            starts = random_prompts(files, np.random.default_rng(0))
            anywhere[split] = median(map(distinct_ngrams, _continuations(model, starts, eos)))
    repetition = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt.text)])
        greedy, sampled = (_continuations(model, ids, eos, heat)[0] for heat in (0.0, 0.8))
        found = distinct_ngrams(greedy), distinct_ngrams(sampled)
        repetition.append(Repetition(prompt.id, prompt.split, *found))
    loss = {name: text_loss(model, part) for name, part in _sample(texts).items()}
    return TargetNumbers(loss, long_loss, repetition, anywhere)


def _continuations(
    model: Any, prompts: Tensor, separator: int, temperature: float = 0.0
) -> list[list[int]]:
    texts = write(model, prompts, separator, GENERATED_TOKENS, temperature)
    return [until(separator, ids) for ids in texts[:, prompts.shape[1] :].tolist()]


def _sample(texts: Mapping[str, Documents]) -> dict[str, list[Sequence[int]]]:
    """The start of a few files of each split that has any, spread evenly over the split."""
    return {
        split: [ids[:_FILE_TOKENS] for ids in files[:: max(1, len(files) // _FILES)][:_FILES]]
        for split, files in texts.items()
        if files
    }
