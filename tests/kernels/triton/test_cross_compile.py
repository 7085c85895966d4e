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
import torch

MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that a program may have. Unit: bytes."""

BUDGETS = Path(__file__).with_name("budgets.csv")
"""What a program of each kernel may use, and how many of them a multiprocessor holds at least."""

SHAPE = ("DIM", "BLOCK_M", "NODES", "HEADS", "PAGE", "WINDOW", "PROBES")
SHAPE += ("HAS_LSE", "HAS_NORM", "HAS_DELTA", "FILTERED", "REDUCED", "NOISE", "BLOCK_K", "PARTS")


def shape_of(each: dict[str, Any]) -> str:
    """The shape of a compiled kernel, as the table names it."""
    of = each["of"]
    names = [name for name in SHAPE if name in of]
    if each["kernel"] == "merge_items":  # the same for all tiles
        names.remove("BLOCK_M")
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


@pytest.mark.slow
@pytest.mark.parametrize("capability", MAX_SHARED)
def test_kernels_keep_to_the_registers_and_memory_of_a_gpu(capability: int) -> None:
    from paceline.kernels._triton.plan import programs_per_sm

    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cross_compile.py")), str(capability)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
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
    for each in facts:
        assert each["shared"] <= MAX_SHARED[capability], each
    assert not over_budget(capability, facts)
    attention = [each for each in facts if each["kernel"] == "attend_items"]
    assert {each["of"]["DIM"] for each in attention} == {64, 80, 96, 128, 256}
    assert {each["of"]["type"] for each in attention} == {"*bf16", "*fp16", "*fp32"}
    for each in attention:
        assert each["async_copies"], f"keys and values are not fetched ahead: {each}"
        full = each["of"]["type"] == "*fp32"
        assert each["tensor_products"] or full
        dtype = torch.float32 if full else torch.bfloat16
        planned = programs_per_sm(each["of"]["BLOCK_M"], each["of"]["WIDE"], dtype)
        planned -= capability == 80 and planned > 1  # see _programs
        assert each["programs"] >= planned, each
