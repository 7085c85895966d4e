"""Compiles kernels for sm_90 (H100, H200) on a machine without a GPU; prints what they use.

One JSON line a kernel: its name, bytes of shared memory, and whether it copies asynchronously and
multiplies on tensor cores. Not interpreted, hence a process of its own. ``--all``: more shapes.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels._triton.jit.attention import attend_items, merge_items
from paceline.kernels._triton.jit.rows import add_norm_rows, gate_rows, turn_rows
from paceline.kernels._triton.jit.sampling import choose_rows

TARGET = GPUTarget("cuda", 90, 32)
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
        "shared": compiled.metadata.shared,
        "async_copies": len(re.findall(r"cp\.async\.cg|cp\.async\.bulk", ptx)),
        "tensor_products": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
    }
    print(json.dumps(facts), flush=True)


def compile_attention(kv: str, dim: int, rows: int, page: int, probes: int) -> None:
    pointers = ("keys", "values")
    types = dict.fromkeys(pointers, f"*{kv}")
    types |= dict.fromkeys(("q", "part", "part_lse", "noted", "lse"), "*fp32")
    integers = ("items", "blocks", "rows", "masks", "tables", "tiles", "bases")
    types |= dict.fromkeys(integers, "*i32")
    types |= {"places": "*i64", "probes": "*i64", "scale": "fp32", "out": f"*{kv}"}
    types |= dict.fromkeys((*STRIDES, "table_stride"), "i32")
    shape = {"GROUP": 4, "DIM": dim, "WIDE": triton.next_power_of_2(dim)}
    shape |= {"BLOCK_M": rows, "USED": rows}
    compile_kernel(
        attend_items,
        types,
        {**shape, "BLOCK_N": 64, "PAGE": page, "ALIGN": 16, "WINDOW": 0, "WORDS": 8,
         "PROBES": probes, "STAGES": 5 if page else 3},
        num_warps=4,
    )  # fmt: skip
    compile_kernel(merge_items, types, {**shape, "CHUNKS": 16, "HAS_LSE": True}, num_warps=2)


def compile_rows() -> None:
    types = dict.fromkeys(("heads", "keys", "values", "delta", "gate_up", "out"), "*bf16")
    types |= dict.fromkeys(("table", "q_norm", "k_norm", "q_out", "x", "weight"), "*fp32")
    types |= dict.fromkeys(("rows", "blocks", "tables"), "*i32")
    types |= dict.fromkeys((*STRIDES, "table_stride"), "i32")
    types |= {"positions": "*i64", "places": "*i64"}
    types |= dict.fromkeys(("q_eps", "k_eps", "eps"), "fp32")
    heads = {"Q_HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64, "PAGE": 256, "HAS_NORM": True}
    compile_kernel(turn_rows, types, heads, num_warps=1)
    compile_kernel(add_norm_rows, types, {"WIDTH": 4096, "BLOCK": 4096, "HAS_DELTA": True})
    compile_kernel(gate_rows, types, {"WIDTH": 14336, "BLOCK": 1024})


def compile_sampling() -> None:
    types = {"logits": "*bf16", "tokens": "*i64", "integers": "*i64", "floats": "*fp64"}
    types |= {"vocab": "i32", "stride": "i32"}
    compile_kernel(choose_rows, types, {"BLOCK": 1024}, num_warps=8)


if __name__ == "__main__":
    compile_attention("bf16", 128, 64, page=256, probes=2)
    if "--all" in sys.argv:
        compile_attention("bf16", 128, 128, page=256, probes=2)
        compile_attention("bf16", 128, 16, page=0, probes=0)
        compile_attention("fp16", 96, 16, page=0, probes=0)
        compile_attention("fp16", 80, 64, page=0, probes=0)
        compile_attention("fp16", 64, 64, page=1, probes=0)
    compile_rows()
    compile_sampling()
