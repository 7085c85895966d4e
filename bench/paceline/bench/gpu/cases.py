"""Cases of measurements on a GPU, random models, and times of single actions."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor

from paceline.decoder import DecoderConfig
from paceline.kernels import PagedPlane

PAGE = 256
SMALL = DecoderConfig(
    model_type="llama", layers=4, hidden=512, intermediate=1280, q_heads=8, kv_heads=2,
    head_dim=64, vocab_size=4096, max_position=8192, norm_eps=1e-5,
    rope_inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)), rope_scaling=1.0,
    windows=(None, 300, None, None), qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
    tied=True, eos_token_ids=(), bos_token_id=None, dtype=torch.float32, kv_dtype=torch.float32,
    weights="float32",
)  # fmt: skip
EIGHT_BILLION = replace(
    SMALL, layers=32, hidden=4096, intermediate=14336, q_heads=32, kv_heads=8, head_dim=128,
    vocab_size=128_256, max_position=65_536, windows=(None,) * 32, tied=False,
    rope_inv_freq=tuple(500000.0 ** (-i / 64) for i in range(64)), dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16, weights="bfloat16",
)  # fmt: skip
DRAFTED = 32_000  # tokens that the head of a trained LongSpec drafter has
# Largest figures, by the name of a report and the name of a figure in it.
Targets = Mapping[tuple[str, str], float]


class RandomWeights(Mapping[str, Tensor]):
    """Weights by their Hugging Face names, each drawn when it is read."""

    def __init__(self, config: DecoderConfig, device: torch.device, seed: int) -> None:
        self._config, self._device, self._seed = config, device, seed
        width, dim = config.hidden, config.head_dim
        q, kv, wide = config.q_heads * dim, config.kv_heads * dim, config.intermediate
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, width),
            "lm_head.weight": (config.vocab_size, width),
            "model.norm.weight": (width,),
        }
        for layer in range(config.layers):
            base = f"model.layers.{layer}."
            self._shapes |= {
                f"{base}self_attn.q_proj.weight": (q, width),
                f"{base}self_attn.k_proj.weight": (kv, width),
                f"{base}self_attn.v_proj.weight": (kv, width),
                f"{base}self_attn.o_proj.weight": (width, q),
                f"{base}input_layernorm.weight": (width,),
                f"{base}post_attention_layernorm.weight": (width,),
            }
            blocks = [f"{base}mlp."]
            if config.experts:
                self._shapes[f"{base}mlp.router.weight"] = config.experts, width
                blocks = [f"{base}mlp.experts.{expert}." for expert in range(config.experts)]
            for block in blocks:
                self._shapes |= dict.fromkeys(
                    (f"{block}gate_proj.weight", f"{block}up_proj.weight"), (wide, width)
                )
                self._shapes[f"{block}down_proj.weight"] = width, wide
            if config.qk_norm:
                norms = (f"{base}self_attn.{name}_norm.weight" for name in "qk")
                self._shapes |= dict.fromkeys(norms, (dim,))

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        drawn = torch.empty(shape, dtype=self._config.dtype, device=self._device)
        # By name: layers are loaded on several threads, in any order.
        seed = self._seed << 32 | crc32(name.encode())
        drawn.normal_(generator=torch.Generator(self._device).manual_seed(seed))
        return drawn.mul_(1.5 * shape[-1] ** -0.5) if len(shape) > 1 else drawn.mul_(0.2).add_(1.0)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Pages:
    """KV of some sequences in shuffled pages of one pool.

    It is itself a cache for the decoder: the first sequence's.
    """

    table = None

    def __init__(self, config: DecoderConfig, device: torch.device, *slots: int) -> None:
        """Allocate this many positions for each sequence, rounded up to pages."""
        counts = [-(-count // PAGE) for count in slots]
        shape = (sum(counts), config.layers, 2, config.kv_heads, PAGE, config.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=config.dtype, device=device)
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        pages = torch.randperm(sum(counts)).int().split(counts)
        for row, table in enumerate(pages):
            tables[row, : len(table)] = table
        self._tables = tables.to(device)
        self._row = 0

    def sequence(self, row: int) -> Self:
        """Return the cache of another sequence in the same pool."""
        other = copy(self)
        other._row = row
        return other

    def layer(self, index: int) -> tuple[PagedPlane, PagedPlane]:
        slots = self._tables.shape[1] * PAGE
        keys, values = (
            PagedPlane(self.pool[:, index, kind], self._tables, self._row, slots) for kind in (0, 1)
        )
        return keys, values


def report(name: str, value: Any) -> None:
    """Print a result as a line of JSON, at once: it stays if a later measurement fails."""
    print(json.dumps({name: value}), flush=True)


def missed_targets(figures: Mapping[str, Mapping[str, Any]], targets: Targets) -> list[str]:
    """Return what figures miss, in words: a figure is larger than its target, or there is none."""
    missed = []
    for (name, part), limit in targets.items():
        figure = figures.get(name, {}).get(part)
        if figure is None:
            missed.append(f"{name}: {part} has no figure")
        elif not figure <= limit:  # NaN misses too
            missed.append(f"{name}: {part} is {figure:.4g}, above {limit:.4g}")
    return missed


def fail_if_missed(missed: Sequence[str], device: torch.device) -> None:
    """End the process with an error if targets were missed or parts left out; a CPU has none."""
    if device.type == "cuda" and missed:
        sys.exit(f"missed or left out: {'; '.join(missed)}")


def median_ms(action: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median milliseconds of an action on an idle device; on a GPU with cold caches."""
    for _ in range(3):
        action()
    times = []
    if device.type != "cuda":
        for _ in range(3):
            began = time.perf_counter()
            action()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written by a large copy. Unit: GB/s."""
    size = 1 << (32 if device.type == "cuda" else 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * size / median_ms(lambda: goal.copy_(source), device, repeats=10) / 1e6
