"""Paceline's decoder, and what it is compared with: transformers and llama.cpp.

An engine measures one context at a time. What it finds: ``prefill_s``, seconds of reading the
context; ``tokens_per_s`` of plain decoding behind it; ``ms_N``, a step of N rows. Tokens are
random.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from paceline.convert import load_decoder
from paceline.decoder import LocalCache
from paceline.kernels import QueryBlock, plan_trees
from paceline.train.blocks import plain_folder

CHUNK = 256  # rows of a prefill chunk, as the engine cuts a prompt; only its last row has logits
_TRANSFORMERS_CHUNK = 2048  # tokens of a prefill that go through transformers at once
_DECODED = 32  # tokens of plain decoding
_STEPS = 5  # whose median counts
Figures = dict[str, float]


class StepEngine(Protocol):
    """One way to run the target."""

    name: str

    def measure(self, context: int, rows: Sequence[int]) -> Figures: ...


class PacelineEngine:
    """The decoder as the verifier calls it: binary trees, and prompts in chunks of `CHUNK` rows."""

    def __init__(self, target: Path, weights: str, *, synthetic: bool = False) -> None:
        """Load the target; contexts that are ``synthetic`` are random keys and values, and there is
        no prefill."""
        self.name = f"paceline {weights}"
        self._synthetic = synthetic
        self.decoder = load_decoder(target, weights, numerics="auto")  # as the verifier does
        gc.freeze()  # as the verifier does

    def measure(self, context: int, rows: Sequence[int]) -> Figures:
        """See :class:`StepEngine`; a step of at least `CHUNK` rows is a chunk of a prompt."""
        figures: Figures = {}
        if self._synthetic:
            cache = self.synthetic_cache(context)
        else:
            cache = LocalCache(self.decoder.config)
            began = time.perf_counter()
            while len(cache) < context:
                count = min(CHUNK, context - len(cache))
                self.step(cache, count, chunk=True)
                cache.commit(range(count))
            figures["prefill_s"] = time.perf_counter() - began
        for count in rows:
            step = partial(self.step, cache, count, chunk=count >= CHUNK)
            figures[f"ms_{count}"] = _median_ms(step)
        began = time.perf_counter()
        for _ in range(_DECODED):
            self.step(cache, 1)
            cache.commit([0])
        return figures | {"tokens_per_s": _DECODED / (time.perf_counter() - began)}

    def synthetic_cache(self, context: int) -> LocalCache:
        """Return a cache of so many positions with random keys and values."""
        cache = LocalCache(self.decoder.config)
        cache.reserve(context)
        first = cache.layer(0)[0].normal_()
        for layer in range(self.decoder.config.kv_layers):
            for plane in cache.layer(layer):
                plane.copy_(first)
        cache.commit(range(context))
        if cache.states is not None:
            cache.states.assume(context)
        return cache

    def step(self, cache: LocalCache, rows: int, chunk: bool = False) -> float:
        """Run a step of so many rows, a binary tree, or a chunk of a prompt; nothing is committed.

        Returns:
            How long the choice of tokens took. Unit: seconds.
        """
        cache.reserve(rows)
        parents = None if chunk else (-1, *((node - 1) // 2 for node in range(1, rows)))
        plan = plan_trees([QueryBlock(0, len(cache), parents, rows)])
        tokens = torch.randint(self.decoder.config.vocab_size, (rows,))
        last = torch.tensor([rows - 1]) if chunk else None
        logits = self.decoder.forward(tokens, plan, [cache], logit_rows=last).logits
        began = time.perf_counter()
        logits.argmax(dim=-1)
        return time.perf_counter() - began


class TransformersEngine:
    """Transformers in bfloat16, with a chain for a tree."""

    name = "transformers bfloat16"

    def __init__(self, target: Path, vocab: int) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with TemporaryDirectory() as copy:
            folder = plain_folder(target, Path(copy))
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._vocab = vocab

    @torch.inference_mode()
    def measure(self, context: int, rows: Sequence[int]) -> Figures:
        cache = DynamicCache()
        began = time.perf_counter()
        for first in range(0, context, _TRANSFORMERS_CHUNK):
            tokens = self._tokens(min(_TRANSFORMERS_CHUNK, context - first))
            self._model.model(tokens, past_key_values=cache, use_cache=True)
        figures = {"prefill_s": time.perf_counter() - began}
        for count in (*rows, 1):
            figures[f"ms_{count}"] = _median_ms(partial(self._step, self._tokens(count), cache))
        return figures | {"tokens_per_s": 1e3 / figures["ms_1"]}

    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> None:
        self._model(tokens, past_key_values=cache, use_cache=True)
        cache.crop(-tokens.shape[1])

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randint(self._vocab, (1, count))


class LlamaCpp:
    """``llama-bench`` on one GGUF file; a step is a short prompt, whose last row has logits."""

    def __init__(self, program: str, model: Path, threads: int) -> None:
        self.name = f"llama.cpp {model.stem}"
        self._command = [program, "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]

    def measure(self, context: int, rows: Sequence[int]) -> Figures:
        prompts, new = ",".join(map(str, rows)), str(_DECODED)
        [prefill] = _json([*self._command, "-p", str(context), "-n", "0"])
        steps = _json([*self._command, "-p", prompts, "-n", new, "-d", str(context)])
        return {
            "prefill_s": prefill["avg_ns"] / 1e9,
            **{f"ms_{test['n_prompt']}": test["avg_ns"] / 1e6 for test in steps[:-1]},
            "tokens_per_s": steps[-1]["avg_ts"],
        }


def _json(command: Sequence[str]) -> Any:
    return json.loads(subprocess.check_output(command))


def _median_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(_STEPS + 1):
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])
