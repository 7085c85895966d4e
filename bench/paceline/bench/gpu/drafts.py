"""Times of drafts for an 8B target, without a verifier: what the host does, and the GPU.

The folders of the drafters are random, and so are the target's KV and hidden states, which lie in
pages as in a verifier's pool.

"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.bench.gpu.cases import EIGHT_BILLION, SMALL, report
from paceline.bench.gpu.services import SEQUENCES, config_fields, write_drafters, write_target
from paceline.decoder import DecoderConfig
from paceline.device import device_of
from paceline.drafter import Budget, GenerationInfo, Resources, Update
from paceline.drafter.growth.graphs import FED, NOISES
from paceline.drafter.kv.reader import CacheReader, KvPages, KvReader, StateReader, StateSlice
from paceline.drafter.methods import method_class
from paceline.kernels import SINKS, streaming

FORMATS = ("bfloat16", "int8")  # of the matrices of drafters
PAGE = 64  # positions of a page
CONTEXT = 1024  # tokens of each text before the first draft
# Tokens that a round emits, rounds, and those of them that are not timed.
NEW, ROUNDS, WARM = 4, 30, 5
BUDGET = Budget(32, 8)


class PoolReader(CacheReader):
    """Data in a pool that stays."""

    length = 0

    @property
    def committed(self) -> int:
        return self.length

    def check(self) -> None:
        """The data never goes."""

    def close(self) -> None:
        """Nothing to release."""


class PoolKv(PoolReader, KvReader):
    """A layer of random KV in pages of a pool."""

    def __init__(self, pool: Tensor, pages: np.ndarray) -> None:
        self._pool, self._pages = pool, pages  # [pages, 2, Hkv, PAGE, D]
        self._selection = self._budget = 0
        self.paged = pool.device.type == "cuda"

    def refresh(self, below: int, budget: int) -> int:
        self._selection, self._budget = min(self.length, below), budget
        return self._selection

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        planes = self._pool[torch.from_numpy(self._pages).long()]
        keys, values = (planes[:, kind].transpose(0, 1).flatten(1, 2) for kind in (0, 1))
        return [
            (keys[:, part.start : part.stop], values[:, part.start : part.stop])
            for part in streaming(self._selection, self._budget)
        ]

    def pages(self, layer: int) -> KvPages | None:
        if not self.paged:
            return None
        ranges = streaming(self._selection, self._budget)
        first = ranges[1].start if len(ranges) > 1 else SINKS
        newest = self._pages[first // PAGE : -(-self._selection // PAGE)]
        return KvPages(
            self._pool.dtype, (self._pool.shape[2], PAGE, self._pool.shape[4]),
            self._pool.data_ptr(), self._pool[0].nbytes, sum(map(len, ranges)), first,
            np.concatenate([self._pages[:1], newest]).astype(np.int32),
        )  # fmt: skip


class PoolStates(PoolReader, StateReader):
    """Random hidden states, one row a layer and position."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows  # [positions, layers, hidden]
        self.paged = rows.device.type == "cuda"

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        return begin, self._rows[begin:end].flatten(1)

    def slice(self, begin: int, end: int) -> StateSlice:
        if not self.paged:
            return super().slice(begin, end)
        numbers = np.arange(begin * self._rows.shape[1], end * self._rows.shape[1])
        row_bytes = self._rows[0, 0].nbytes
        addresses = self._rows.data_ptr() + numbers.reshape(end - begin, -1) * row_bytes
        return StateSlice(begin, lambda: self.read(begin, end)[1], addresses, self._rows.dtype)


def write_ends(folder: Path, config: DecoderConfig, device: torch.device) -> None:
    """Write a target's folder with what drafters read of it."""
    folder.mkdir()
    size = config.vocab_size, config.hidden
    weights = {
        name: (torch.randn(size, device=device) * scale).to("cpu", config.dtype)
        for name, scale in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", 0.02))
    }
    weights["model.norm.weight"] = torch.ones(config.hidden, dtype=config.dtype)
    last = f"model.layers.{config.layers - 1}.mlp.down_proj.weight"  # a target is known by it
    weights[last] = torch.randn(config.hidden, config.intermediate).to(config.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_fields(config)))


def measure(drafter: Any, count: int, config: DecoderConfig) -> dict[str, Any]:
    """Return the medians of drafts for some texts. Unit: milliseconds."""
    device, draws = drafter.layers.device, np.random.default_rng(0)
    room = CONTEXT + NEW * (ROUNDS + 1)
    held = -(-room // PAGE)
    pool = torch.empty(
        count * held, 2, config.kv_heads, PAGE, config.head_dim, dtype=config.dtype, device=device
    ).normal_()
    order = draws.permutation(count * held).reshape(count, held)
    sequences, readers = [], []
    for number in range(count):
        text = draws.integers(0, config.vocab_size // 2, CONTEXT).tolist()
        data: dict[str, Any]
        if layers := drafter.needs.hidden_state_layers:
            rows = torch.empty(
                room, len(layers), config.hidden, dtype=config.dtype, device=device
            ).normal_()
            data = {"states": PoolStates(rows)}
        else:
            data = {"kv": PoolKv(pool, order[number])}
        (reader,) = data.values()
        reader.length = CONTEXT - 1
        sequence = drafter.start(GenerationInfo(text, CONTEXT, config.vocab_size, **data))
        while sequence.backlog:
            sequence.warm(512)
        sequences.append(sequence)
        readers.append(reader)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        trees = drafter.draft_many([(sequence, BUDGET) for sequence in sequences])
        times.append((time.perf_counter() - began) * 1e3)
        assert all(len(tree) for tree in trees)
        for sequence, reader in zip(sequences, readers, strict=True):
            reader.length += NEW
            sequence.extend(Update(draws.integers(0, config.vocab_size // 2, NEW).tolist()))
    figures: dict[str, Any] = {"draft_ms": round(median(times[WARM:]), 3)}
    if device.type == "cuda":
        figures |= parts(drafter, count)
    for sequence in sequences:
        sequence.close()
    return figures


def parts(drafter: Any, sequences: int) -> dict[str, Any]:
    """Return times of the replay of a draft (ms) and of its kernels (us), and their number."""
    from torch.profiler import ProfilerActivity, profile

    graph = drafter.growth.ways[-1].graph(sequences, FED[0], NOISES[0])
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(4):
            graph.run()
        torch.cuda.synchronize()
    kernels = [
        (kernel.self_device_time_total / 4, kernel.count / 4, kernel.key)
        for kernel in profiled.key_averages()
        if kernel.self_device_time_total > 0
    ]
    return {
        "replay_ms": round(median(times), 3),
        "kernels_us": round(sum(us for us, _, _ in kernels)),
        "kernels": sum(n for _, n, _ in kernels),
        "by_kernel": [
            f"{us:.0f} us, {n:g} x {key[:70]}" for us, n, key in sorted(kernels, reverse=True)[:16]
        ],
    }


def drafts(device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    large = device.type == "cuda"
    config = EIGHT_BILLION if large else replace(SMALL, layers=2, windows=(None, None), tied=False)
    with tempfile.TemporaryDirectory(prefix="pl") as temporary:
        folder = Path(temporary)
        if large:  # nothing else of it is read
            write_ends(folder / "target", config, device)
        else:
            write_target(folder / "target", config, device, 0)
        write_drafters(folder, folder / "target", config)
        for method, weights in product(("longspec", "dspark"), FORMATS):
            options = {"target": str(folder / "target"), "weights": weights}
            resources = Resources(device_of(device))
            drafter: Any = method_class(method).load(folder / method, options, resources)
            for count in SEQUENCES if large else (1, 2):
                report(f"{count} x {method}, {weights}", measure(drafter, count, config))
            del drafter
