"""The kernels compile for a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_compile_for_sm_90() -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cross_compile.py"))],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in facts} == {
        *("attend_items", "merge_items", "rotate_rows", "add_norm_rows", "gate_rows", "choose_rows")
    }
    assert all(each["shared"] <= 227 * 1024 for each in facts), "more than a program may have"
    attention = [each for each in facts if each["kernel"] == "attend_items"]
    assert {each["of"]["DIM"] for each in attention} == {64, 80, 96, 128, 256}
    assert {each["of"]["type"] for each in attention} == {"*bf16", "*fp16", "*fp32"}
    for each in attention:
        assert each["async_copies"], f"keys and values are not fetched ahead: {each}"
        assert each["tensor_products"] or each["of"]["type"] == "*fp32"
    narrow = attention[0]  # 16 nodes, heads of 128: two of them must fit on a multiprocessor
    assert 2 * (narrow["shared"] + 1024) <= 228 * 1024
