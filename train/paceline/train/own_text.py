"""Texts that a target writes itself, for training its drafters."""

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
_LENGTH, _ROWS = 512, 32  # tokens of a whole text, prompts drawn at a time


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
        prompts = torch.cat([random_prompts(documents, draw) for _ in range(-(-count // _ROWS))])
        tasks = [
            Task(ids, SamplingParams(temperature=number % 2, seed=number), _LENGTH - PROMPT)
            for number, ids in enumerate(prompts[:count].tolist())
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


def random_prompts(documents: Documents, draw: np.random.Generator) -> Tensor:
    """Windows from random positions of random documents, int64 [32, 128].

    Raises ValueError if no document is as long as a window.
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
    model: Any, prompts: Tensor, separator: int, count: int, temperature: float = 0.0
) -> Tensor:
    """Generate `count` tokens after `prompts` (int64 [rows, tokens]) with an HF model.

    Returns int32 [rows, tokens + count] on the CPU: prompt and text, padded with `separator`.
    """
    prompts = prompts.to(model.device)
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    written = model.eval().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=count,
        pad_token_id=separator,
        **how,
    )
    missing = prompts.shape[1] + count - written.shape[1]
    return torch.nn.functional.pad(written, (0, missing), value=separator).to("cpu", torch.int32)


def until(separator: int, text: list[int]) -> list[int]:
    """`text` up to its first `separator`."""
    return text[: text.index(separator)] if separator in text else text
