"""The measurements of a target's model card, on the weights as they are saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from paceline.decoder import Decoder
from paceline.kernels.sampling import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.evaluate import Documents, distinct_ngrams, text_loss
from paceline.train.own_text import PROMPT, random_prompts, until

GENERATED_TOKENS = 256
TRAINED, EARLY, HELDOUT = "trained", "early", "heldout"
"""Splits of text: trained on to the end, in the first part of the run only, never."""
_FILE_TOKENS = 2048  # of each measured file, from its start
_FILES = 12
_TEXTS = 32
_LONG_FILES = 4  # that fill the context: attention is slow on these


@dataclass(frozen=True)
class TargetNumbers:
    """Loss per split in nats per token, and repetition in greedy texts."""

    loss: dict[str, float]
    """In windows of 1024 tokens."""
    long_loss: dict[str, float]
    """In windows of the whole context; only splits with files that fill it."""
    distinct: dict[str, float]
    """Median share of distinct 4-grams in greedy texts from 32 random positions, per split."""


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
