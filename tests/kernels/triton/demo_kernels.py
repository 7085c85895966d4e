"""Which kernels the demo models compile at a start on a GPU, on a machine without one.

Prints a JSON line for the verifier and for each drafter: the variants that are compiled ahead, and
those that captures launch. Nothing is compiled. Not interpreted, hence a process of its own.

    python demo_kernels.py
    python demo_kernels.py compile      # compiles those of the verifier, and one that is broken
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from paceline.convert import load_decoder
from paceline.decoder import GraphRunner
from paceline.decoder.graphs import FIXED_SHAPES
from paceline.drafter.growth import graphs as draft_graphs
from paceline.drafter.growth.graphs import DraftGraphs
from paceline.drafter.methods import method_class
from paceline.drafter.methods.base import Resources
from paceline.drafter.methods.longspec.drafter import GPU_TREE
from paceline.kernels import devices
from paceline.kernels.triton import ahead
from paceline.kernels.triton.kernels import TritonKernels
from paceline.verifier.kv.base import KvLayout
from paceline.verifier.kv.pool import PagePool

DEMO = Path(__file__).parents[3] / "models" / "demo"
# Their options: those of a GPU, where a CPU has others.
DRAFTERS = {"longspec": GPU_TREE, "dspark": {}}

draft_graphs.SEQUENCES = (1, 32)  # others lie between

CPU = torch.device("cpu")
variants: dict[str, set[tuple[str, str]]] = {}


def note(*, fn: Any, key: Any, **_: object) -> bool:
    """Note a variant that is to be compiled; nothing is compiled or launched."""
    when = "captured" if ahead._submitted.get() is None else "ahead"
    variants[when].add((fn.name, str(key)))
    return True


def report(name: str) -> None:
    """Print the variants noted since the last report."""
    found = {when: sorted(keys) for when, keys in variants.items()}
    print(json.dumps({"of": name, **found}), flush=True)
    variants.update(ahead=set(), captured=set())


def as_on_a_gpu(graphs: Any) -> Any:
    """Graphs that compile their kernels, and run what they would capture."""
    graphs._capturing._device = torch.device("meta")
    return graphs


def verifier() -> GraphRunner:
    """The graphs of the target."""
    decoder = load_decoder(DEMO / "target")
    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, config.dtype)
    pool = PagePool(layout, CPU, kv_bytes=64 << 20, max_sequences=4, max_context=4096)
    graphs: GraphRunner = as_on_a_gpu(GraphRunner(decoder, pool, required=True))
    graphs.shapes = FIXED_SHAPES
    launch_on_cpu()
    return graphs


def drafter(method: str) -> None:
    """The graphs of a drafter."""
    options = {**DRAFTERS[method], "target": str(DEMO / "target")}
    made: Any = method_class(method).load(DEMO / method, options, Resources())
    heads = getattr(made.layers, "heads", None)
    if (head := getattr(heads, "_markov", None)) is not None:  # a GPU does not pack it
        heads._w2 = SimpleNamespace(weight=head.markov_w2.weight, packed=None)
    launch_on_cpu()
    settings = replace(made.settings, drafted_on_device=made.settings.drafted)
    slots = made.needs.kv_budget
    as_on_a_gpu(DraftGraphs(made.layers, settings, method, slots)).warm_up()


def launch_on_cpu() -> None:
    """From here on the CPU launches the kernels of a GPU."""
    devices.LOADED["cpu"] = TritonKernels()


@ahead.Kernel
@triton.jit
def broken(out):
    tl.static_assert(False, "this kernel is broken")


def compile_verifier() -> None:
    """Compile on two threads, the first two kernels of which end together; then capture."""
    together, compiled, steps = threading.Barrier(2, timeout=120), [], []

    def listen(*, src: Any, **_: object) -> None:
        compiled.append((src.fn.__name__, threading.current_thread().name))
        if not together.broken and len(compiled) <= 2:
            together.wait()

    triton.knobs.compilation.listener = listen
    # Out of ``compile_ahead`` too, launches only compile.
    KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    ahead.os.sched_getaffinity = lambda process: {0, 1}
    launch = partial(broken[(1,)], torch.empty(4))
    graphs = verifier()
    graphs.compile([launch], lambda *step: steps.append(step))
    count = len(compiled)
    assert list(graphs.warm_up())
    known = [dict(kernels) for kernels, *_ in broken.function.device_caches.values()]
    facts = {"compiled": compiled[:count], "later": compiled[count:], "steps": steps}
    print(json.dumps({**facts, "failed": sum(map(len, known))}))


def main() -> None:
    """Report the verifier and the drafters."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    if sys.argv[1:] == ["compile"]:
        compile_verifier()
        return
    triton.knobs.runtime.jit_cache_hook = note
    variants.update(ahead=set(), captured=set())
    graphs = verifier()
    graphs.compile()
    assert list(graphs.warm_up())
    report("verifier")
    for method in DRAFTERS:
        drafter(method)
        report(method)


if __name__ == "__main__":
    main()
