"""The kernels compile for GPUs that are not there, and keep to their budgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that a program may have. Unit: bytes."""

MAX_SPILLED = {80: 160, 90: 0, 100: 0}
"""Bytes that a kernel over bfloat16 may spill from registers."""


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
        *("attend_items", "merge_items", "rotate_rows", "add_norm_rows", "gate_rows"),
        *("find_best", "find_candidates", "find_border", "perturb"),
    }
    for each in facts:
        assert each["shared"] <= MAX_SHARED[capability], each
        if each["of"]["type"] != "*fp32":
            assert each["spilled"] <= MAX_SPILLED[capability], each
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
