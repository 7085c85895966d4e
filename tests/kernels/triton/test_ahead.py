"""Kernels are compiled before the passes that launch them, all at once."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def gate() -> torch.Tensor:
    """What a kernel writes."""
    from paceline.kernels.triton.backend import TritonRows

    return TritonRows().gate(torch.ones(2, 8))


def test_a_pass_that_only_compiles_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that fails, which is reported and ends nothing."""
    from paceline.kernels.triton import backend
    from paceline.kernels.triton.ahead import compile_ahead

    wanted, found = gate(), []
    monkeypatch.setattr(backend.torch, "empty", torch.zeros)
    compile_ahead([lambda: found.append(gate())])
    assert torch.equal(found[0], torch.zeros_like(wanted))
    assert torch.equal(gate(), wanted)


def test_a_pass_that_fails_is_reported_and_the_next_one_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from paceline.kernels.triton.ahead import compile_ahead

    ran: list[bool] = []

    def fail() -> None:
        raise RuntimeError("the device has no memory")

    with caplog.at_level(logging.WARNING):
        compile_ahead([fail, lambda: ran.append(gc.isenabled())])
    assert ran == [False], "a collection would let two threads parse at once"
    assert gc.isenabled()
    assert "the device has no memory" in caplog.text
    assert gate().any(), "launches launch again"


def demo_kernels(cache: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """What the script prints, and says of errors, with an empty cache of kernels."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("demo_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), *words], env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


# Kernels that a service compiles for the graphs of the demo models, with no other loaded.
MOST = {"verifier": 6, "longspec": 24, "dspark": 19}


@pytest.mark.slow
def test_all_kernels_that_captures_launch_are_compiled_ahead(tmp_path: Path) -> None:
    """And they are few: a kernel with one variant for each level of a tree has many."""
    found, _ = demo_kernels(tmp_path)
    assert {each["of"] for each in found} == set(MOST)
    for each in found:
        assert each["captured"]
        assert not [key for key in each["captured"] if key not in each["ahead"]], each["of"]
        assert len(each["ahead"]) <= MOST[each["of"]], [name for name, _ in each["ahead"]]


@pytest.mark.slow
def test_kernels_compile_side_by_side_and_a_broken_one_stops_none(tmp_path: Path) -> None:
    """Two threads wait for each other. Captures then compile nothing."""
    ((found,), errors) = demo_kernels(tmp_path, "compile")
    names = [name for name, _ in found["compiled"]]
    kernels = ["attend_items", "merge_items", "rotate_rows", "gate_rows"]
    assert sorted(names) == sorted([*kernels, "add_norm_rows", "add_norm_rows"])
    assert len({thread for _, thread in found["compiled"]}) == 2
    assert found["later"] == []
    assert found["steps"] == [[count, 7] for count in range(1, 8)]
    assert "broken could not be compiled ahead" in errors
    assert "this kernel is broken" in errors
    assert found["failed"] == 0, "the next launch compiles it again"
