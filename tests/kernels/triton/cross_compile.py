"""Compiles kernels for a GPU on a machine without one; prints what they use.

One JSON line a kernel: its name, registers, spilled bytes, shared memory, programs that run side by
side on a multiprocessor, asynchronous copies, instructions of tensor cores, and fused products and
sums in its inner loops. Not interpreted, hence a process of its own.

    python cross_compile.py 90              # sm_80: A100; sm_90: H100, H200; sm_100: B200
    python cross_compile.py 89 attention    # these kernels alone; sm_86, sm_89, sm_120: GeForce
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from paceline.kernels import (
    AttentionCall,
    LevelBlock,
    Norm,
    PagedPlane,
    Probe,
    QueryBlock,
    SamplingParams,
    plan_trees,
)
from paceline.kernels.caches import Plane
from paceline.kernels.triton import backend, tiles
from paceline.kernels.triton.backend import (
    TritonBackend,
    TritonRows,
    accept_drafts,
    perturbed,
)
from paceline.kernels.triton.candidates import best_of_rows, grow_trees
from paceline.kernels.triton.gather import gather_kv, gather_states
from paceline.kernels.triton.plan import path_words
from paceline.kernels.triton.products import (
    multiply_by_experts,
    multiply_weight_only,
    quantise_rotated,
    scaled_sums,
)

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}[CAPABILITY] << 10
"""Shared memory of a multiprocessor. Unit: bytes."""
META = torch.device("meta")
SLOTS = 2048
KV_HEADS = 8


def report(
    *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object
) -> None:
    """Print the facts of a kernel that was compiled."""
    (ptx,) = (Path(path).read_text() for name, path in metadata_group.items() if ".ptx" in name)
    (cubin,) = (path for name, path in metadata_group.items() if ".cubin" in name)
    facts = {
        "kernel": src.fn.__name__,
        "of": {src.fn.arg_names[at]: value for (at,), value in src.constants.items()}
        | {"type": src.signature.get("keys", "")},
        **resources(ptx, metadata["shared"], metadata["num_warps"]),
        "async_copies": len(re.findall(r"cp\.async\.cg|cp\.async\.bulk", ptx)),
        "tensor_products": sorted(set(re.findall(_PRODUCTS, ptx))),
        "fused": fused(cubin) if src.fn.__name__ == "attend_items" else 0,
    }
    print(json.dumps(facts), flush=True)


_PRODUCTS = r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def fused(cubin: str) -> int:
    """Fused products and sums in the loops over keys, which are those without a loop inside."""
    said = subprocess.run(
        [TOOLS / "cuobjdump", "-sass", cubin],
        env=os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    code = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^/;]+);", said)}
    loops = [
        (int(goal[1], 16), at)
        for at, text in code.items()
        if (goal := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)) and int(goal[1], 16) < at
    ]
    assert loops
    inner = [
        (begin, end) for begin, end in loops
        if not any(begin <= a and b <= end and (a, b) != (begin, end) for a, b in loops)
    ]  # fmt: skip
    return sum(
        "FFMA" in text and any(begin <= at <= end for begin, end in inner)
        for at, text in code.items()
    )


def resources(ptx: str, shared: int, warps: int) -> dict[str, int]:
    """What ptxas says of a kernel, and how many programs of it a multiprocessor holds."""
    name = "ptxas-blackwell" if CAPABILITY >= 100 else "ptxas"
    compiler = TOOLS / name
    (target,) = re.findall(r"\.target (sm_\w+)", ptx)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = subprocess.run(
            [compiler, "-v", f"--gpu-name={target}", file.name, "--output-file=/dev/null"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    (registers,) = map(int, re.findall(r"Used (\d+) registers", said))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    programs = min(by_registers, SHARED // (shared + 1024))
    return {"registers": registers, "spilled": spilled, "shared": shared, "programs": programs}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def planes(kv: torch.dtype, dim: int, page: int) -> tuple[list[Plane], list[Plane]]:
    """Keys and values of a sequence in a layer; page 0: contiguous."""
    if not page:
        return [empty(KV_HEADS, SLOTS, dim, dtype=kv)], [empty(KV_HEADS, SLOTS, dim, dtype=kv)]
    pool = empty(SLOTS // page, 2, 2, KV_HEADS, page, dim, dtype=kv)
    tables = empty(2, SLOTS // page + 1, dtype=torch.int32)
    keys, values = (PagedPlane(pool[:, 0, kind], tables, 1, SLOTS) for kind in (0, 1))
    return [keys], [values]


def compile_attention(
    kv: torch.dtype,
    dim: int,
    page: int,
    *,
    group: int = 4,
    window: int | None = None,
    probes: int = 0,
    tree: bool = False,
) -> None:
    """With probes, weights are recorded too; with a window, sinks. The device knows the paths of a
    tree."""
    start, nodes = 1000, 8
    block = QueryBlock(0, start, None, nodes)
    if tree:
        block = LevelBlock(0, start, None, nodes, levels=(4, 4))
    paths = empty(1, nodes, nodes, dtype=torch.bool) if tree else None
    plan = plan_trees([block], device=META, ancestors=paths)
    q, out = empty(nodes, KV_HEADS * group, dim), empty(nodes, KV_HEADS * group, dim, dtype=kv)
    asked = [Probe(0, node, empty(KV_HEADS, start)) for node in range(probes)]
    if probes:
        asked.append(Probe(0, 0, empty(KV_HEADS, start), weights=True))
    lse = sinks = None
    if window:
        lse, sinks = empty(nodes, KV_HEADS * group), empty(KV_HEADS * group)
    call = AttentionCall(
        q, *planes(kv, dim, page), plan, dim**-0.5, window, out, lse, asked, sinks=sinks
    )
    TritonBackend().attend(call)


def compile_rows(kv: torch.dtype, dim: int, page: int, *, norms: bool) -> None:
    """The steps between products, for a model of a type."""
    rows, plan = TritonRows(), plan_trees([QueryBlock(0, 0, None, 8)], device=META)
    rows.add_norm(
        empty(8, 4096), empty(8, 4096, dtype=kv) if norms else None, Norm(empty(4096), 1e-5), kv
    )
    rows.gate(empty(8, 2 * 14336, dtype=kv))
    heads, norm = empty(8, (32 + 2 * KV_HEADS) * dim, dtype=kv), Norm(empty(dim), 1e-5)
    both = (norm, norm) if norms else None
    rows.rotate(heads, both, empty(SLOTS, dim), plan, *planes(kv, dim, page))


def compile_int8(kind: torch.dtype) -> None:
    """The steps around products of 8-bit integers."""
    quantise_rotated(empty(8, 4096, dtype=kind), 64)
    quantise_rotated(empty(8, 14336, dtype=kind), 512)
    sums = empty(8, 6144, dtype=torch.int32)
    scaled_sums(sums, empty(8), empty(6144), None, kind)


def compile_weight_only(kind: torch.dtype) -> None:
    """Products of 8-bit weights: a head, and a narrow matrix in splits."""
    for rows in (8, 64, 256):
        for outs in (32_000, 1024):
            values, scale = empty(outs, 4096, dtype=torch.int8), empty(outs)
            multiply_weight_only(empty(rows, 4096, dtype=kind), values, scale, None)


def compile_experts(kind: torch.dtype, experts: int = 128, width: int = 2048) -> None:
    """The product of routed experts."""
    weights, bias = empty(experts, 768, width, dtype=kind), empty(experts, 768, dtype=kind)
    chosen = empty(512, dtype=torch.int64)
    multiply_by_experts(empty(512, width, dtype=kind), weights, bias, chosen)


def compile_sampling(kind: torch.dtype, vocab: int = 151_936) -> None:
    """The sampling contract over logits of a type, and rejection sampling."""
    logits, params = empty(2, vocab, dtype=kind), [SamplingParams(top_k=1)] * 2
    perturbed(logits, params, [0, 1])
    perturbed(logits, params, [0, 1], empty(vocab, dtype=torch.int64))
    drafts, chances = np.zeros((1, 5), np.int64), np.zeros((2, 40), np.int64)
    accept_drafts(empty(2, vocab), empty(2, dtype=torch.int64), drafts, chances)


def compile_candidates(kind: torch.dtype, vocab: int = 32_768, width: int = 16) -> None:
    """The candidates of a drafter's logits, and a level of trees."""
    logits, ids = empty(64, vocab, dtype=kind), empty(vocab, dtype=torch.int64)
    record = empty(64, 6, dtype=torch.int64)
    best_of_rows(logits, width)
    best_of_rows(logits, width, ids=ids)
    best_of_rows(logits, width, record, ids)
    best_of_rows(logits, width, record, ids, filtered=True)
    nodes = 68
    tables = (
        empty(4, nodes, dtype=torch.int64), empty(4, nodes, dtype=torch.int64),
        empty(2, 4, nodes, dtype=torch.float64),
    )  # fmt: skip
    candidates = empty(64, width, dtype=torch.int64), empty(64, width)
    above, last = empty(4, 16, dtype=torch.float64), empty(4, 1, dtype=torch.int64)
    paths = empty(4, nodes, nodes, dtype=torch.bool)
    grow_trees(
        candidates, above, last, tables, paths, 52, 16, min_score=-4.0, chain=False,
        confidences=above,
    )  # fmt: skip
    path_words(paths[:, :52, :52], empty(4, 4, dtype=torch.int32)[:, 1])


def compile_gathers(kind: torch.dtype) -> None:
    """Of a target's keys and values, and of its hidden states."""
    source, records = empty(16, dtype=kind), empty(4, 5, dtype=torch.int64)
    pages = empty(4, 35, dtype=torch.int32)
    gather_kv(source, records, pages, empty(4, 2, KV_HEADS, 512, 128, dtype=kind))
    gather_states(source, empty(8, 3, dtype=torch.int64), empty(8, 3 * 4096, dtype=kind))


def compile_all() -> None:
    """Every type, head size, kind of cache and option, each with others."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for probes in range(3):
        compile_attention(bf16, 128, 256, probes=probes)
    compile_attention(bf16, 128, 256, window=512)
    compile_attention(bf16, 128, 0, window=512, tree=True)
    compile_attention(bf16, 256, 256)
    compile_attention(bf16, 64, 256)
    compile_attention(bf16, 96, 1, group=7)
    compile_attention(fp16, 80, 0, group=5, probes=1)
    compile_attention(torch.float32, 64, 0, window=100)
    compile_attention(torch.float32, 64, 256)
    if sys.argv[2:] == ["attention"]:
        return
    compile_rows(bf16, 128, 256, norms=True)
    compile_rows(fp16, 80, 0, norms=False)
    compile_int8(bf16)
    compile_weight_only(bf16)
    compile_experts(bf16)
    compile_experts(torch.float32)
    compile_sampling(bf16)
    compile_candidates(bf16)
    compile_gathers(bf16)


def compile_only() -> None:
    """From here on, a launch in this process compiles for a GPU and runs nothing. Tensors of the
    device "meta" stand for those of the GPU: they have alignment and no memory."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    KernelInterface.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    for module in (backend, tiles):
        module.little_shared_memory = lambda device: SHARED < 128 << 10  # type: ignore[attr-defined]


triton.knobs.compilation.listener = report
compile_only()
if __name__ == "__main__":
    compile_all()
