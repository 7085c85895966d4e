"""Compiles kernels for a GPU on a machine without one; prints what they use.

One JSON line a kernel: its name, registers, spilled bytes, shared memory, programs that run side by
side on a multiprocessor, asynchronous copies, instructions of tensor cores, and, where products and
sums must not be contracted, what is fused. Not interpreted, hence a process of its own.

    python cross_compile.py 90    # sm_80: A100; sm_90: H100, H200; sm_100: B200
    python cross_compile.py 89    # sm_86, sm_89, sm_120: GeForce
"""

import json
import os
import re
import subprocess
import sys
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

from paceline.cuda.triton import backend, tiles
from paceline.cuda.triton.backend import TritonRows, accept_drafts, perturbed
from paceline.cuda.triton.candidates import best_of_rows, grow_trees
from paceline.cuda.triton.gather import gather_kv, gather_states
from paceline.cuda.triton.kernels import TritonKernels
from paceline.cuda.triton.plan import path_words
from paceline.cuda.triton.products import multiply_by_experts, quantise_rotated, scaled_sums
from paceline.kernels import (
    AttentionCall,
    LevelBlock,
    Norm,
    PagedPlane,
    Probe,
    QueryBlock,
    SamplingRules,
    plan_trees,
)
from paceline.kernels.caches import Plane
from paceline.kernels.rotated import IntSums

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
# Shared memory of a multiprocessor. Unit: bytes.
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}[CAPABILITY] << 10
META = torch.device("meta")
SLOTS = 2048
KV_HEADS = 8


def report(
    *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object
) -> None:
    """Print the facts of a kernel that was compiled."""
    files = {Path(name).suffix: Path(path) for name, path in metadata_group.items()}
    ptx = files[".ptx"].read_text()
    of = {src.fn.arg_names[at]: value for (at,), value in src.constants.items()}
    types = (src.signature[name] for name in ("keys", "weights", "x") if name in src.signature)
    facts = {
        "kernel": src.fn.__name__,
        "of": of | {"type": next(types, "")},
        **resources(files[".cubin"], metadata["shared"], metadata["num_warps"]),
        "async_copies": len(re.findall(r"cp\.async\.cg|cp\.async\.bulk", ptx)),
        "tensor_products": sorted(set(re.findall(_PRODUCTS, ptx))),
        "fused": None if metadata["enable_fp_fusion"] else fused(files),
    }
    print(json.dumps(facts), flush=True)


_PRODUCTS = r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def fused(files: dict[str, Path]) -> dict[str, int]:
    """Fused products and sums of float32 and float64: how many numbers they compute.

    ``asked``: those of library functions, such as logarithms, and of ``tl.dot`` without tensor
    cores; ``ptx``: those that the PTX has. With more than asked, the compiler has contracted some.
    ``open``: products and sums that ptxas may contract, which are those of no named rounding.
    ``code``: fused ones of the machine code. ``divisions``: those with IEEE rounding, in which
    ptxas fuses.
    """
    ttgir, llir, ptx = (files[name].read_text() for name in (".ttgir", ".llir", ".ptx"))
    # Of the two variants of float32 in a library function, Triton takes the one with ftz.
    asked = count(r"call .*@llvm\.nvvm\.fma\.rn\.(?:ftz\.f|d)()\(", llir)
    if "tt.dot" in ttgir:
        asked += count(r"call .*@llvm\.fmuladd\.(?:v(\d+))?f32\(", llir)
    return {
        "asked": asked,
        "ptx": count(r"\bfma\.rn\.(?:ftz\.)?f(?:32|64)(?:x(2))?\b", ptx),
        "open": count(r"\b(?:add|sub|mul)\.(?:ftz\.)?f(?:32|64)(?:x(2))?\b", ptx),
        "code": count(r"\b[FD]FMA(2)?\b", dump("-sass", files[".cubin"])),
        "divisions": count(r"\bdiv\.rn\.f32()\b", ptx),
    }


def count(instruction: str, text: str) -> int:
    """How many numbers an instruction computes in a text; its group has the numbers of a vector."""
    return sum(int(lanes or 1) for lanes in re.findall(instruction, text))


def resources(cubin: Path, shared: int, warps: int) -> dict[str, int]:
    """Registers of a thread and its bytes of spilled ones, shared memory, and how many programs a
    multiprocessor holds."""
    used = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage", cubin))
    assert used
    registers, spilled = map(int, used.groups())
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    programs = min(by_registers, SHARED // (shared + 1024))
    return {"registers": registers, "spilled": spilled, "shared": shared, "programs": programs}


def dump(what: str, cubin: Path) -> str:
    """What NVIDIA's tool says of machine code."""
    return subprocess.run(
        [TOOLS / "cuobjdump", what, cubin],
        env=os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


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
    kv: torch.dtype, dim: int, page: int, *, group: int = 4, window: int | None = None,
    probes: int = 0, tree: bool = False,
) -> None:  # fmt: skip
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
    TritonKernels().attend(call)


def product(width: int, kind: torch.dtype, scaled: int) -> Tensor | IntSums:
    """A product of 8 rows. Scaled, as in the kernels: 0: in its type; 1: in integer sums; 2: with a
    bias too."""
    if not scaled:
        return empty(8, width, dtype=kind)
    sums, outs = empty(24, width, dtype=torch.int32), empty(width)
    return IntSums(sums, empty(8), outs, outs if scaled == 2 else None, kind)


def compile_rows(kv: torch.dtype, dim: int, page: int, *, norms: bool, scaled: int = 0) -> None:
    """The steps between products, for a model of a type."""
    rows, plan = TritonRows(), plan_trees([QueryBlock(0, 0, None, 8)], device=META)
    delta = product(4096, kv, scaled) if norms or scaled else None
    rows.add_norm(empty(8, 4096), delta, Norm(empty(4096), 1e-5), kv)
    rows.gate(product(2 * 14336, kv, scaled))
    heads, norm = product((32 + 2 * KV_HEADS) * dim, kv, scaled), Norm(empty(dim), 1e-5)
    both = (norm, norm) if norms else None
    rows.rotate(heads, both, empty(SLOTS, dim), plan, *planes(kv, dim, page))


def compile_int8(kind: torch.dtype) -> None:
    """The steps around products of 8-bit integers."""
    quantise_rotated(empty(8, 4096, dtype=kind), 64)
    quantise_rotated(empty(8, 14336, dtype=kind), 512)
    sums, outs = empty(8, 6144, dtype=torch.int32), empty(6144)
    for bias in (None, outs):
        scaled_sums(sums, empty(8), outs, bias, kind)


def compile_experts(kind: torch.dtype, experts: int, width: int, *, bias: bool) -> None:
    weights, biases = empty(experts, 768, width, dtype=kind), empty(experts, 768, dtype=kind)
    chosen = empty(512, dtype=torch.int64)
    x = empty(512, width, dtype=kind)
    multiply_by_experts(x, weights, biases if bias else None, chosen)


def compile_sampling(kind: torch.dtype, vocab: int = 151_936) -> None:
    """The sampling contract over logits of a type, and rejection sampling."""
    logits, ids = empty(2, vocab, dtype=kind), empty(vocab, dtype=torch.int64)
    for params in ([SamplingRules()] * 2, [SamplingRules(top_k=1)] * 2):
        perturbed(logits, params, [0, 1])
        perturbed(logits, params, [0, 1], ids)
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
    compile_attention(bf16, 256, 256, probes=2)
    compile_attention(bf16, 256, 0)
    compile_attention(bf16, 64, 256)
    compile_attention(bf16, 96, 1, group=7)
    compile_attention(fp16, 80, 0, group=5, probes=1)
    compile_attention(torch.float32, 64, 0, window=100)
    compile_attention(torch.float32, 64, 256)
    compile_rows(bf16, 128, 256, norms=True)
    compile_rows(fp16, 80, 0, norms=False)
    compile_rows(bf16, 128, 256, norms=True, scaled=1)
    compile_rows(fp16, 80, 0, norms=False, scaled=2)
    compile_int8(bf16)
    compile_experts(bf16, 128, 2048, bias=True)
    compile_experts(bf16, 32, 2880, bias=False)
    compile_experts(torch.float32, 128, 2048, bias=True)
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
