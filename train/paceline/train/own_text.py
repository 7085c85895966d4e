"""Texts that a target writes itself, for training its drafters."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import load_file, save_file

from paceline.decoder import Decoder
from paceline.kernels.sampling import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.evaluate import Documents

PROMPT = 128
"""Tokens of a random prompt."""
_LENGTH = 512  # tokens of a whole text


def own_texts(
    decoder: Decoder, documents: Documents, count: int, separator: int, path: Path
) -> list[list[int]]:
    """Token ids of `count` texts: 128 tokens from `documents`, and what the target writes after.

    Every other text is greedy, the rest is sampled at temperature 1, each with a seed of its own:
    the tokens are those that a verifier would emit. A text ends at 512 tokens or where the target
    ends it with `separator`. The texts are written to `path` and read from there next time.

    Raises ValueError if no document is as long as a prompt.
    """
    if count == 0:
        return []
    if not path.is_file():
        draw = np.random.default_rng(0)
        tasks = [
            Task(ids, SamplingParams(temperature=number % 2, seed=number), _LENGTH - PROMPT)
            for number, ids in enumerate(random_prompts(documents, count, draw))
        ]
        rows = torch.full((count, _LENGTH), separator, dtype=torch.int32)
        written = write_texts(decoder, tasks, separator)
        for number, text in track(written, "the target's own texts", total=count):
            row = torch.tensor([*tasks[number].prompt, *text], dtype=torch.int32)
            rows[number, : len(row)] = row
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({"tokens": rows}, partial)
        os.replace(partial, path)
    texts: list[list[int]] = load_file(path)["tokens"].tolist()
    return [until(separator, text) for text in texts]


def random_prompts(
    documents: Documents, count: int, draw: np.random.Generator
) -> list[Sequence[int]]:
    """`count` windows of 128 tokens from random positions of random documents.

    Raises ValueError if no document is as long as a window.
    """
    long = [ids for ids in documents if len(ids) >= PROMPT]
    if not long:
        raise ValueError(f"no document has {PROMPT} tokens to start a text with: give longer ones")
    prompts = []
    for _ in range(count):
        ids = long[draw.integers(len(long))]
        start = int(draw.integers(len(ids) - PROMPT + 1))
        prompts.append(ids[start : start + PROMPT])
    return prompts


def until(separator: int, text: list[int]) -> list[int]:
    """`text` up to its first `separator`."""
    return text[: text.index(separator)] if separator in text else text
