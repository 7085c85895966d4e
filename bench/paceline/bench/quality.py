"""`paceline bench quality`: what quantised weights and KV change in a model's predictions.

KL divergence from the model with weights and KV in bfloat16, perplexity, and how often the
likeliest token is the same. Half of the text is documents of this project, half is sources of the
standard library. As in ``llama-perplexity``, windows of 1,024 tokens are read, and the second half
of each is predicted.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from paceline.bench.models import Models
from paceline.bench.prompts import tokenizer
from paceline.bench.record import Results, make_console
from paceline.bench.step.engines import CHUNK
from paceline.convert import load_decoder
from paceline.decoder import Decoder, LocalCache
from paceline.kernels import QueryBlock, plan_trees

WINDOW = 1024
_PROSE = ("*.md", "docs/*.md")
_FIGURES = {
    "kl_divergence": r"Mean\s+KLD:\s+(\S+)",
    "perplexity": r"Mean PPL\(Q\)\s+:\s+(\S+)",
    "base_perplexity": r"Mean PPL\(base\)\s+:\s+(\S+)",
    "same_top": r"Same top p:\s+(\S+)",
}  # in the output of `llama-perplexity --kl-divergence`; the last one is in percent


def held_out(target: Path, windows: int) -> Tensor:
    """Return token ids ``[windows, WINDOW]``: half of them prose, half code. Raises ``ValueError``
    if this checkout and the standard library have less text."""
    prose = [file for pattern in _PROSE for file in sorted(Path().glob(pattern))]
    code = sorted(Path(statistics.__file__).parent.glob("*.py"))
    encode, tokens = tokenizer(target).encode, []
    for files, count in ((prose, windows // 2), (code, windows - windows // 2)):
        ids: list[int] = []
        for file in files:
            if len(ids) < count * WINDOW:
                ids += encode(file.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(ids) < count * WINDOW:
            raise ValueError(
                f"{len(files)} files have {len(ids)} tokens, expected {count * WINDOW}: run in a "
                "source checkout, or take fewer --windows"
            )
        tokens += ids[: count * WINDOW]
    return torch.tensor(tokens).view(windows, WINDOW)


def predictions(decoder: Decoder, window: Tensor) -> Tensor:
    """Return log-probabilities ``[WINDOW / 2 - 1, V]`` of the tokens after the middle, float32."""
    cache, logprobs = LocalCache(decoder.config), []
    for start in range(0, len(window), CHUNK):
        rows = min(CHUNK, len(window) - start)
        cache.reserve(rows)
        plan = plan_trees([QueryBlock(0, start, None, rows)])
        logits = decoder.forward(window[start : start + rows], plan, [cache], logit_rows=None)
        cache.commit(range(rows))
        logprobs.append(logits.logits.float().log_softmax(dim=-1))
    return torch.cat(logprobs)[len(window) // 2 : -1]


def compare(base: Sequence[Tensor], other: Decoder, text: Tensor) -> dict[str, float]:
    """Return means over all predicted tokens of a text ``[windows, WINDOW]``.

    Args:
        base: :func:`predictions` of the windows by what `other` is compared with.
    """
    divergences, losses, base_losses, same = [], [], [], []
    for right, window in zip(base, text, strict=True):
        logprobs = predictions(other, window)
        chosen = window[len(window) // 2 + 1 :, None]
        divergences.append((right.exp() * (right - logprobs)).sum(dim=-1))
        losses.append(-logprobs.gather(1, chosen))
        base_losses.append(-right.gather(1, chosen))
        same.append(right.argmax(dim=-1) == logprobs.argmax(dim=-1))
    return {
        "kl_divergence": float(torch.cat(divergences).mean()),
        "perplexity": math.exp(float(torch.cat(losses).mean())),
        "base_perplexity": math.exp(float(torch.cat(base_losses).mean())),
        "same_top": float(torch.cat(same).float().mean()),
    }


def llama_cpp(program: str, models: Sequence[Path], text: str, windows: int) -> dict[str, Any]:
    """Return the same of GGUF files by ``llama-perplexity``, against the first of them. Raises
    ``ValueError`` if it printed no figures."""
    rows = {}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        file, base = Path(folder, "text"), str(Path(folder, "base"))
        file.write_text(2 * text, encoding="utf-8")  # another tokenizer may find fewer tokens
        options = ["-c", str(WINDOW), "--chunks", str(windows), "--kl-divergence-base", base]
        for model in models:
            first = model is models[0]
            mode = ["-f", str(file)] if first else ["--kl-divergence"]
            command = [program, "-m", str(model), *options, *mode]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if not first:
                output = done.stdout + done.stderr
                figures = {key: re.findall(pattern, output) for key, pattern in _FIGURES.items()}
                if not all(figures.values()):
                    raise ValueError(f"{program} measured nothing: {output[-500:]}")
                rows[f"llama.cpp {model.stem}"] = {
                    key: float(values[-1]) / (100 if key == "same_top" else 1)
                    for key, values in figures.items()
                }
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure every format of weights and KV, and the GGUF files; print and record."""
    console = make_console()
    target = Models.of(args).target
    text = held_out(target, args.windows)
    exact = load_decoder(target, "bfloat16")
    base = [predictions(exact, window) for window in text]
    others: dict[str, Callable[[], Decoder]] = {
        **{name: partial(load_decoder, target, name) for name in args.weights},
        **{
            f"KV in {name}": partial(load_decoder, target, "bfloat16", kv_cache_dtype=name)
            for name in args.kv_cache_dtype
        },
        **{file.stem: partial(load_decoder, file) for file in args.gguf},
    }
    rows: dict[str, dict[str, float]] = {}
    for name, load in others.items():
        rows[f"paceline {name}"] = compare(base, load(), text)
        console.log(f"{name} is measured")
    program = args.llama_perplexity or shutil.which("llama-perplexity")
    if program and args.llama_model:
        plain = tokenizer(target).decode(text.flatten().tolist(), skip_special_tokens=False)
        rows |= llama_cpp(program, args.llama_model, plain, args.windows)
    table = Table("", *(key.replace("_", " ") for key in _FIGURES), title=target.name)
    for name, figures in rows.items():
        table.add_row(name, *(f"{figures[key]:.4f}" for key in _FIGURES))
    console.print(table)
    results = Results("quality", args.output, target, windows=args.windows)
    results.add(args.label or target.name, {"against": "bfloat16", "rows": rows})
    console.print(f"written to {results.file}")
    return 0
