"""`paceline bench step`: milliseconds of a decoder step by rows and context, and of a prefill.

A step is one forward pass over a chain of so many rows behind so many committed positions, with
logits for every row. Tokens are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.bench.models import Models
from paceline.bench.record import Results
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import TreeSegment, plan_trees

ROWS = (1, 8, 16, 33, 64)
CONTEXTS = (128, 2048, 6144)
PREFILLS = (2048, 6144)
PREFILL_ROWS = 256
"""Rows of a prefill chunk, as the engine cuts a prompt."""


def measure(
    target: Path,
    dtype: str = "bfloat16",
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    prefills: Sequence[int] = PREFILLS,
    repeats: int = 9,
) -> dict[str, Any]:
    """Median milliseconds by context and rows, and of whole prefills, where they fit the target.

    Args:
        target: A Hugging Face folder.
        dtype: float32 or bfloat16.
        rows: Numbers of rows of a step.
        contexts: Committed positions before the step.
        prefills: Lengths of prompts.
        repeats: Steps a median is taken of.
    """
    decoder = Decoder.load(target, dtype)
    steps: dict[str, dict[str, float]] = {}
    longest = decoder.config.max_position
    for context in contexts:
        if context + max(rows) > longest:
            continue
        cache = _prefill(decoder, context)
        steps[str(context)] = {
            str(count): _median_ms(partial(_forward, decoder, cache, count), repeats)
            for count in rows
        }
    return {
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "step_ms": steps,
        "prefill_ms": {
            str(n): _median_ms(partial(_prefill, decoder, n), 1) for n in prefills if n <= longest
        },
    }


def _prefill(decoder: Decoder, length: int) -> LocalCache:
    cache = LocalCache(decoder.config, decoder.device)
    while len(cache) < length:
        rows = min(PREFILL_ROWS, length - len(cache))
        _forward(decoder, cache, rows, torch.tensor([rows - 1]))
        cache.commit(range(rows))
    return cache


def _forward(
    decoder: Decoder, cache: LocalCache, rows: int, logit_rows: Tensor | None = None
) -> None:
    """Run rows behind the cache's text without committing them."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(decoder.config.vocab_size, (rows,), generator=generator)
    cache.reserve(rows)
    plan = plan_trees([TreeSegment(0, len(cache), None, rows)])
    decoder.forward(tokens, plan, [cache], logit_rows=logit_rows)


def _median_ms(step: Callable[[], object], repeats: int) -> float:
    if repeats > 1:
        step()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        taken.append((time.perf_counter() - begin) * 1e3)
    return round(statistics.median(taken), 2)


def run(args: argparse.Namespace) -> int:
    """Measure a target, print its times, and record them under `args.label`."""
    results = Results("step", args.output)
    target = Models.of(args).target
    found = measure(target, args.dtype)
    for context, steps in found["step_ms"].items():
        print(f"{context:>6}", *(f"{rows} rows {ms} ms" for rows, ms in steps.items()), sep="  ")
    print("prefill", *(f"{length}: {ms / 1e3:.2f} s" for length, ms in found["prefill_ms"].items()))
    results.add(args.label or target.name, found)
    print(f"written to {results.file}")
    return 0
