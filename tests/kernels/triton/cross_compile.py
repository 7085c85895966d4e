"""Compiles kernels for a GPU on a machine without one; prints what they use.

One JSON line a kernel: its name, registers, spilled bytes, shared memory, programs that run side by
side on a multiprocessor, and whether it copies asynchronously and multiplies on tensor cores. Not
interpreted, hence a process of its own.

    python cross_compile.py 90          # sm_80: A100; sm_90: H100, H200; sm_100: B200
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels._triton import backend
from paceline.kernels._triton.backend import MERGE_CHUNKS, attend_shape, record_shape
from paceline.kernels._triton.jit.attention import attend_items, merge_items, record_items
from paceline.kernels._triton.jit.rows import (
    add_norm_rows,
    gate_rows,
    rotate_rows,
    scale_rows,
)
from paceline.kernels._triton.jit.sampling import (
    accept_or_resample,
    collect_span,
    find_best,
    find_border,
    find_candidates,
    finish_border,
    perturb,
    sum_chances,
    sum_residuals,
    weigh_spans,
)
from paceline.kernels._triton.plan import choose_tiling
from paceline.kernels.float8 import LARGEST, SMALLEST

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
TARGET = GPUTarget("cuda", CAPABILITY, 32)
SHARED = {80: 164, 90: 228, 100: 228}[CAPABILITY] << 10
"""Shared memory of a multiprocessor. Unit: bytes."""
STRIDES = ("key_page", "key_head", "key_slot", "value_page", "value_head", "value_slot")


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> None:
    """Compile with 16-byte aligned pointers and integers, as PyTorch passes them."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(names)
            if signature[name].startswith("*") or name in (*STRIDES, "table_stride")
        },
    )
    compiled = triton.compile(source, target=TARGET, options=options)
    ptx = compiled.asm["ptx"]
    facts = {
        "kernel": kernel.__name__,
        "of": {**constants, **options, "type": signature.get("keys", "")},
        **resources(ptx, compiled.metadata.shared, compiled.metadata.num_warps),
        "async_copies": len(re.findall(r"cp\.async\.cg|cp\.async\.bulk", ptx)),
        "tensor_products": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)),
    }
    print(json.dumps(facts), flush=True)


def resources(ptx: str, shared: int, warps: int) -> dict[str, int]:
    """What ptxas says of a kernel, and how many programs of it a multiprocessor holds."""
    name = "ptxas-blackwell" if CAPABILITY >= 100 else "ptxas"
    compiler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
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


TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_attention(
    kv: str, dim: int, nodes: int, page: int, *, group: int = 4, window: int = 0, probes: int = 0
) -> None:
    """What the backend would launch for blocks of so many nodes."""
    pointers = ("keys", "values")
    types = dict.fromkeys(pointers, f"*{kv}")
    types |= dict.fromkeys(("q", "part", "part_lse", "probed", "lse", "sinks"), "*fp32")
    integers = ("items", "blocks", "rows", "masks", "tables", "tiles", "bases")
    types |= dict.fromkeys(integers, "*i32") | {"wanted": "*i64", "noted": "*i64"}
    types |= {"places": "*i64", "probes": "*i64", "layer": "i32", "scale": "fp32", "out": f"*{kv}"}
    types |= dict.fromkeys((*STRIDES, "table_stride"), "i32")
    keys = torch.empty(1, 8, 1, dim, dtype=TYPES[kv])
    tiling = choose_tiling(nodes * group, group, keys, window)
    shape, options = attend_shape(tiling, dim, page, probes)
    compile_kernel(attend_items, types, {**shape, "ALIGN": 16}, **options)
    if probes:
        noted, options = record_shape(tiling, dim, page)
        compile_kernel(record_items, types, {**noted, "ALIGN": 16}, **options)
    merged = {name: shape[name] for name in ("GROUP", "DIM", "WIDE", "BLOCK_M", "USED")}
    merged |= {"CHUNKS": MERGE_CHUNKS, "HAS_LSE": bool(window), "HAS_SINKS": bool(window)}
    compile_kernel(merge_items, types, merged, num_warps=2)


def compile_rows(kv: str = "bf16", dim: int = 128, page: int = 256, *, norms: bool = True) -> None:
    """The steps between products, for a model of a type."""
    types = dict.fromkeys(("heads", "keys", "values", "delta", "gate_up", "out"), f"*{kv}")
    types |= dict.fromkeys(("table", "q_norm", "k_norm", "q_out", "x", "weight"), "*fp32")
    types |= dict.fromkeys(("rows", "blocks", "tables"), "*i32")
    types |= dict.fromkeys((*STRIDES, "table_stride"), "i32")
    types |= {"positions": "*i64", "places": "*i64"}
    types |= dict.fromkeys(("q_eps", "k_eps", "eps"), "fp32")
    block = triton.next_power_of_2(dim // 2)
    heads = {"Q_HEADS": 32, "KV_HEADS": 8, "HALF": dim // 2, "BLOCK": block}
    compile_kernel(rotate_rows, types, {**heads, "PAGE": page, "HAS_NORM": norms}, num_warps=1)
    compile_kernel(add_norm_rows, types, {"WIDTH": 4096, "BLOCK": 4096, "HAS_DELTA": norms})
    compile_kernel(gate_rows, types, {"WIDTH": 14336, "BLOCK": 1024})
    if CAPABILITY >= 89:  # the first with 8-bit floats
        types = {"x": f"*{kv}", "values": "*fp8e4nv", "scales": "*fp32"}
        constants = {"LARGEST": LARGEST, "SMALLEST": SMALLEST, "WIDTH": 14336, "BLOCK": 16384}
        compile_kernel(scale_rows, types, constants, num_warps=16)


def compile_sampling(kind: str) -> None:
    """The sampling contract over logits of a type, and rejection sampling."""
    types = {"logits": f"*{kind}", "floats": "*fp64", "out": "*fp32"}
    keys = ("integers", "best", "candidates", "sums", "borders", "ids", "pending", "spans", "near")
    types |= dict.fromkeys(keys, "*i64") | dict.fromkeys(("vocab", "stride", "chunks"), "i32")
    chunk, sizes = {"CHUNK": backend.CHUNK}, {"CHUNKS": 128, "KEEP": backend.KEEP}
    compile_kernel(find_best, types, chunk)
    compile_kernel(find_candidates, types, {**chunk, **sizes}, num_warps=8)
    search = {"BLOCK": backend.SEARCH_BLOCK, "SPANS": backend.SPANS}
    compile_kernel(find_border, types, {**sizes, **search}, num_warps=8)
    types["filled"], spans = "*i32", {"CHUNKS": 128, "SPANS": backend.SPANS}
    room = {**spans, "ROOM": backend.ROOM}
    compile_kernel(weigh_spans, types, {**chunk, **spans}, num_warps=8)
    compile_kernel(collect_span, types, {**chunk, **room}, num_warps=8)
    compile_kernel(finish_border, types, {**room, **search}, num_warps=8)
    for reduced in (False, True):
        options = {"FILTERED": True, "REDUCED": reduced, "BLOCK": backend.NOISE_BLOCK}
        compile_kernel(perturb, types, options)
    types |= dict.fromkeys(("scores", "q", "highest"), "*fp32")
    types |= {"drafts": "*i64", "tokens": "*i64"} | dict.fromkeys(("sums", "rests"), "*fp64")
    sizes = {"CHUNKS": 64, "BLOCK": backend.CHUNK}
    compile_kernel(sum_chances, types, {"BLOCK": backend.CHUNK})
    compile_kernel(sum_residuals, types, sizes)
    compile_kernel(accept_or_resample, types, sizes, num_warps=8)


def compile_all() -> None:
    """Every type, head size, kind of cache and option, each with others."""
    for nodes, probes in ((1, 0), (8, 0), (16, 0), (64, 0), (1, 1), (16, 2), (64, 2)):
        compile_attention("bf16", 128, nodes, 256, probes=probes)
    compile_attention("bf16", 256, 64, 256)
    compile_attention("fp16", 80, 1, 0, group=5, probes=1)
    compile_attention("bf16", 96, 64, 1, group=7)
    compile_attention("bf16", 128, 16, 0, window=512)
    compile_attention("fp32", 64, 16, 0, window=100)
    compile_rows()
    compile_rows("fp16", 80, 0, norms=False)
    compile_sampling("bf16")


if __name__ == "__main__":
    compile_all()
