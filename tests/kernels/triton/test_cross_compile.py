"""The kernels compile for GPUs that are not there, and keep to their budgets."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
MAX_SHARED = {capability: size << 10 for capability, size in KIB.items()}
"""Shared memory that a program may have. Unit: bytes."""

BUDGETS = Path(__file__).with_name("budgets.csv")
"""What a program of each kernel may use, and how many of them a multiprocessor holds at least."""

SHAPE = ("DIM", "BLOCK_M", "NODES", "HEADS", "PAGE", "WINDOW", "TREE", "PROBES")
SHAPE += ("HAS_LSE", "HAS_NORM", "HAS_DELTA", "FILTERED", "REDUCED", "NOISE", "BLOCK_K", "PARTS")


def shape_of(each: dict[str, Any]) -> str:
    """The shape of a compiled kernel, as the table names it."""
    of = each["of"]
    names = [name for name in SHAPE if name in of]
    words = [of["type"].lstrip("*"), *(f"{name}={int(of[name])}" for name in names)]
    return " ".join(filter(None, words)) or "-"


def over_budget(capability: int, facts: list[dict[str, Any]]) -> list[str]:
    """Kernels that use more than the table says, and those that it does not have."""
    with BUDGETS.open() as file:
        rows = {(row["kernel"], row["shape"]): row for row in csv.DictReader(file)}
    over = []
    for each in facts:
        row = rows.get(key := (each["kernel"], shape_of(each)))
        used = {
            "registers": each["registers"],
            "spilled": each["spilled"],
            "KiB": each["shared"] / 1024,
            "programs": -each["programs"],
        }
        if row is None:
            over.append(f"{key} has no row in {BUDGETS.name}; it uses {used}")
            continue
        for name, value in used.items():
            limit = int(row[f"sm_{capability} {name}"])
            if value > (-limit if name == "programs" else limit):
                over.append(f"{key}: {name} {abs(value):g}, the budget is {limit}")
    return over


def compile_for(capability: int, *words: str) -> list[dict[str, Any]]:
    """Facts of the kernels."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("cross_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), *words],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    for each in facts:
        assert each["shared"] <= MAX_SHARED[capability], each
    assert not over_budget(capability, facts)
    return facts


def check_attention(facts: list[dict[str, Any]]) -> None:
    """What equal bits in every batch rest on, and speed."""
    attention = [each for each in facts if each["kernel"] == "attend_items"]
    assert {each["of"]["DIM"] for each in attention} == {64, 80, 96, 128, 256}
    assert {each["of"]["type"] for each in attention} == {"*bf16", "*fp16", "*fp32"}
    instructions: dict[tuple[str, int], set[tuple[str, ...]]] = {}
    for each in attention:
        of = each["of"]
        assert each["async_copies"], f"keys and values are not fetched ahead: {each}"
        products = tuple(each["tensor_products"])
        instructions.setdefault((of["type"], of["WIDE"]), set()).add(products)
        assert bool(products) == (of["type"] != "*fp32")
        if products:
            assert not each["fused"], f"loops with and without masks round differently: {each}"
    for kind, found in instructions.items():
        assert len(found) == 1, f"{kind} is multiplied by several kinds of instructions: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_keep_to_the_registers_and_memory_of_a_gpu(capability: int) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, 89, 120])
def test_attention_fits_gpus_with_less_shared_memory(capability: int) -> None:
    check_attention(compile_for(capability, "attention"))
