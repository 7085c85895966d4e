"""The kernels compile for GPUs that are not there, and keep to their budgets."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# Shared memory that a program may have. Unit: bytes.
MAX_SHARED = {capability: size << 10 for capability, size in KIB.items()}

# What a program of each kernel may use, and how many of them a multiprocessor holds at least.
BUDGETS = Path(__file__).with_name("budgets.csv")

SHAPE: tuple[str, ...] = (
    *("DIM", "BLOCK_M", "NODES", "HEADS", "PAGE", "WINDOW", "TREE", "PROBES"),
    *("HAS_LSE", "HAS_NORM", "HAS_DELTA", "SCALED", "FILTERED", "REDUCED", "NOISE"),
    *("BLOCK_R", "PARTS", "SPLIT", "HAS_BIAS"),
)

# Kernels whose products and sums decide bits that are promised, beside those that scale integer
# sums.
EXACT = {"attend_items", "merge_items", "quantise_rotated_rows", "scale_int_sums", "perturb"}


def shape_of(each: dict[str, Any]) -> str:
    """The shape of a compiled kernel, as the table names it."""
    of = each["of"]
    names = [name for name in SHAPE if name in of]
    words = [of["type"].lstrip("*"), *(f"{name}={int(of[name])}" for name in names)]
    return " ".join(filter(None, words)) or "-"


def over_budget(capability: int, facts: list[dict[str, Any]]) -> list[str]:
    """Kernels that use more than the table says, those that it does not have, and rows of none."""
    with BUDGETS.open() as file:
        rows = {(row["kernel"], row["shape"]): row for row in csv.DictReader(file)}
    keys = [(each["kernel"], shape_of(each)) for each in facts]
    over = [f"no kernel is compiled for the row {key}" for key in rows.keys() - set(keys)]
    for key, each in zip(keys, facts, strict=True):
        used = {
            "registers": each["registers"],
            "spilled": each["spilled"],
            "KiB": each["shared"] / 1024,
            "programs": -each["programs"],
        }
        if key not in rows:
            over.append(f"{key} has no row in {BUDGETS.name}; it uses {used}")
            continue
        for name, value in used.items():
            limit = int(rows[key][f"sm_{capability} {name}"])
            if value > (-limit if name == "programs" else limit):
                over.append(f"{key}: {name} {abs(value):g}, the budget is {limit}")
    return over


def compile_for(capability: int) -> list[dict[str, Any]]:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("cross_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    for each in facts:
        assert each["shared"] <= MAX_SHARED[capability], each
    return facts


def check_attention(facts: list[dict[str, Any]]) -> None:
    """Every type and width is compiled, and keys and values are fetched ahead."""
    attention = [each for each in facts if each["kernel"] == "attend_items"]
    assert {each["of"]["DIM"] for each in attention} == {64, 80, 96, 128, 256}
    assert {each["of"]["type"] for each in attention} == {"*bf16", "*fp16", "*fp32"}
    for each in attention:
        assert each["async_copies"], f"keys and values are not fetched ahead: {each}"


def check_products(facts: list[dict[str, Any]]) -> None:
    """Attention, of heads of one width, and experts are multiplied by one kind of instruction for
    each type, on tensor cores but for float32."""
    instructions: dict[tuple[str, str, int], set[tuple[str, ...]]] = {}
    for each in facts:
        kernel, of = each["kernel"], each["of"]
        if kernel in ("attend_items", "multiply_tiles"):
            width = of["WIDE"] if kernel == "attend_items" else 0
            key = (kernel, of["type"], width)
            instructions.setdefault(key, set()).add(tuple(each["tensor_products"]))
    assert {kind for kernel, kind, _ in instructions if kernel == "multiply_tiles"} == {
        "*bf16", "*fp32"
    }  # fmt: skip
    for key, found in instructions.items():
        assert len(found) == 1, f"{key} is multiplied by several kinds of instructions: {found}"
        assert found == {()} if "*fp32" in key else found != {()}


def check_rounding(facts: list[dict[str, Any]]) -> None:
    """Products and sums that decide bits are not contracted, neither by Triton nor by ptxas: the
    PTX has no fused ones but those of library functions and of ``tl.dot``, and names the rounding
    of all others, which forbids ptxas to contract them. Nor has the machine code, but for those
    that a division takes."""
    names, in_divisions = set(), {0: {0}}
    for each in facts:
        fused, kernel = each["fused"], each["kernel"]
        exact = kernel in EXACT or bool(each["of"].get("SCALED"))
        assert (fused is not None) == exact, f"launched with a wrong enable_fp_fusion: {each}"
        if exact:
            names.add(kernel)
            assert fused["ptx"] == fused["asked"], f"Triton contracts: {each}"
            assert not fused["open"], f"ptxas may contract: {each}"
            more = in_divisions.setdefault(fused["divisions"], set())
            more.add(fused["code"] - fused["ptx"])
    assert names == EXACT | {"add_norm_rows", "gate_rows", "rotate_rows"}
    for divisions, more in in_divisions.items():
        assert len(more) == 1, f"with {divisions} divisions, the machine code fuses {more} more"


@pytest.mark.slow
@pytest.mark.parametrize("capability", MAX_SHARED)
def test_kernels_compile_as_promised_for_a_gpu(capability: int) -> None:
    """They keep to its registers and shared memory, and to what equal bits rest on."""
    facts = compile_for(capability)
    assert {each["kernel"] for each in facts} == {
        *("attend_items", "record_items", "merge_items"),
        *("rotate_rows", "add_norm_rows", "gate_rows", "multiply_tiles"),
        *("quantise_rotated_rows", "scale_int_sums"),
        *("find_best", "find_candidates", "find_border", "perturb"),
        *("weigh_spans", "collect_span", "finish_border"),
        *("sum_chances", "sum_residuals", "accept_or_resample"),
        *("best_of_chunks", "merge_chunks", "grow_level", "pack_paths"),
        *("gather_pages", "gather_rows"),
    }
    check_attention(facts)
    check_products(facts)
    check_rounding(facts)
    assert not over_budget(capability, facts)
