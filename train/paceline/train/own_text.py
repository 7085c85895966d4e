"""Text a target writes itself: what its drafter will be asked to guess."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.decoder import Decoder
from paceline.kernels.sampling import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.evaluate import Documents

PROMPT = 128
"""Tokens of a random prompt."""
_LENGTH, _ROWS = 512, 32  # tokens of a whole text, texts at a time


def own_texts(
    target: Any, documents: Documents, count: int, separator: int, path: Path
) -> list[list[int]]:
    """Token ids of `count` texts: 128 tokens from anywhere in `documents`, and what `target` adds.

    Every other group of 32 is greedy, the rest is sampled at temperature 1. A text ends at 512
    tokens or where the target ends it with `separator`. They are kept at `path` and read from
    there next time.

    Raises ValueError where no document is longer than a prompt.
    """
    if count == 0:
        return []
    if not path.is_file():
        draw = np.random.default_rng(0)
        torch.manual_seed(0)
        groups = range(-(-count // _ROWS))
        rows = torch.cat(
            [
                write(target, random_prompts(documents, draw), separator, greedy=number % 2 == 0)
                for number in track(groups, "the target's own text")
            ]
        )
        _keep(rows[:count].contiguous(), path)
    return _kept(path, separator)


def authored_texts(
    decoder: Decoder, documents: Documents, count: int, separator: int, path: Path
) -> list[list[int]]:
    """Like `own_texts`, several times faster, with the tokens that a verifier would emit.

    Every other text is greedy, the rest is sampled at temperature 1, each with a seed of its own.
    """
    if count == 0:
        return []
    if not path.is_file():
        draw = np.random.default_rng(0)
        prompts = [
            ids for _ in range(-(-count // _ROWS)) for ids in random_prompts(documents, draw)
        ]
        tasks = [
            Task(
                ids.tolist(), SamplingParams(temperature=number % 2, seed=number), _LENGTH - PROMPT
            )
            for number, ids in enumerate(prompts[:count])
        ]
        rows = torch.full((count, _LENGTH), separator, dtype=torch.int32)
        texts = write_texts(decoder, tasks, separator)
        for number, text in track(texts, "the target's own text", total=count):
            row = torch.tensor([*tasks[number].prompt, *text], dtype=torch.int32)
            rows[number, : len(row)] = row
        _keep(rows, path)
    return _kept(path, separator)


def random_prompts(documents: Documents, draw: np.random.Generator) -> Tensor:
    """Windows from random places of random documents, int64 [32, 128].

    Raises ValueError where no document is as long as a window.
    """
    long = [ids for ids in documents if len(ids) >= PROMPT]
    if not long:
        raise ValueError(f"no document has {PROMPT} tokens to start a text with: give longer ones")
    prompts = []
    for _ in range(_ROWS):
        ids = long[draw.integers(len(long))]
        start = int(draw.integers(len(ids) - PROMPT + 1))
        prompts.append(ids[start : start + PROMPT])
    return torch.tensor(prompts)


@torch.no_grad()
def write(
    target: Any, prompts: Tensor, separator: int, greedy: bool, length: int = _LENGTH
) -> Tensor:
    """What `target` makes of `prompts` (int64 [rows, tokens]): int32 [rows, length] on the CPU.

    Rows hold prompt and text; behind a text that ends early stands `separator`.
    """
    prompts = prompts.to(target.device)
    how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    written = target.eval().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length - prompts.shape[1],
        pad_token_id=separator,
        **how,
    )
    missing = length - written.shape[1]
    return torch.nn.functional.pad(written, (0, missing), value=separator).to("cpu", torch.int32)


def _keep(rows: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({"tokens": rows}, partial)
    os.replace(partial, path)


def _kept(path: Path, separator: int) -> list[list[int]]:
    texts: list[list[int]] = load_file(path)["tokens"].tolist()
    return [until(separator, text) for text in texts]


def until(separator: int, text: list[int]) -> list[int]:
    """`text` up to its first `separator`."""
    return text[: text.index(separator)] if separator in text else text
