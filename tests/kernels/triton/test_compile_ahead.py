"""Kernels that an image was built with are those that a first start on a GPU looks up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_first_start_compiles_nothing(tmp_path: Path) -> None:
    from drafter.models import write_model

    model = write_model(tmp_path / "model", "qwen3", 1)
    shipped, home = tmp_path / "shipped", tmp_path / "home"
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}

    def run(*words: str, **more: object) -> str:
        return subprocess.run(
            [sys.executable, *words], env=environment | {k: str(v) for k, v in more.items()},
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip

    ahead = ("-m", "paceline.verifier.compile_ahead", "90", "--model", str(model))
    said = run(*ahead, TRITON_CACHE_DIR=shipped, TRITON_STORE_BINARY_ONLY=1)
    for source in shipped.rglob("*.source"):  # as in the image
        source.unlink()
    start = (str(Path(__file__).with_name("first_start.py")), "90", str(model))
    manager = "paceline.kernels._triton.ahead:ShippedCache"
    settings = {"TRITON_CACHE_MANAGER": manager, "PACELINE_KERNELS": shipped}
    lines = run(*start, TRITON_CACHE_DIR=home, **settings).splitlines()
    kernels = [json.loads(line) for line in lines]
    assert kernels
    assert all(each["hit"] for each in kernels), kernels
    assert said == f"sm_90: {len(kernels)} kernels\n"
    assert not list(home.rglob("*.cubin"))
