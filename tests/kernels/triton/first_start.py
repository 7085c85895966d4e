"""A verifier's first start on a GPU that is not there, up to the launches of its kernels.

Prints a JSON line of each kernel: its name, and whether it was compiled before. Not interpreted,
hence a process of its own.

    python first_start.py 90 FOLDER
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from paceline.decoder import Decoder, GraphRunner
from paceline.kernels import SamplingParams, TreeSegment, executor, plan_trees, register_backend
from paceline.kernels._triton.backend import TritonBackend, TritonRows, perturbed
from paceline.kernels._triton.products import quantise_rotated
from paceline.kernels.rotated import block_size
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool


class Driver:
    """Loads any kernel, and runs none. Tensors are in main memory."""

    def __init__(self, capability: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.launcher_cls = lambda source, metadata: lambda *args: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            load_binary=lambda *args: (1, 1, 32, 0, 1024),
        )


def main() -> None:
    def report(src: Any, cache_hit: bool, **_: object) -> None:
        print(json.dumps({"kernel": src.name, "hit": cache_hit}), flush=True)

    triton.knobs.compilation.listener = report
    triton.runtime.driver.set_active(Driver(int(sys.argv[1])))
    register_backend("cpu", TritonBackend)
    executor.row_kernels = lambda device: TritonRows()  # type: ignore[attr-defined]
    decoder = Decoder.load(sys.argv[2], torch.bfloat16)
    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.kv_dtype)
    pool = PagePool(
        layout, torch.device("cpu"), kv_bytes=8 << 20, max_sequences=4, max_context=1024
    )
    graphs = GraphRunner(decoder, pool)
    for _ in graphs.warm_up():
        pass
    perturbed(torch.zeros(1, config.vocab_size, dtype=config.dtype), [SamplingParams(top_k=1)], [0])
    for width, size in ((config.hidden, 64), (config.intermediate, 512)):  # int8
        quantise_rotated(torch.zeros(1, width).bfloat16(), block_size(width, size))
    # Steps of all widths, by graphs and without one.
    for count in (1, 10, 20, 60, 200):
        assert graphs.forward([0] * count, [TreeSegment(0, 0, None, count)], [1]) is not None
    prompt = plan_trees([TreeSegment(0, 0, None, 256), TreeSegment(0, 256, None, 250)])
    tokens = torch.zeros(prompt.rows, dtype=torch.int64)
    logits = decoder.forward(tokens, prompt, [pool], logit_rows=None).logits
    some = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(5)]
    perturbed(logits[:5], some, range(5))


if __name__ == "__main__":
    main()
