"""The runner of the GPU checks: what fails or hangs takes nothing else along."""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.bench.gpu.__main__ import CHECKS, TOTAL_SECONDS, Check, main, run_check, run_checks


def test_all_of_it_ends_within_ten_minutes() -> None:
    assert TOTAL_SECONDS < 600
    assert max(check.limit for check in CHECKS) < TOTAL_SECONDS / 2
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {check.module for check in CHECKS if check.together}.isdisjoint(
        {check.module for check in CHECKS if not check.together}
    )


def test_every_check_is_there() -> None:
    for check in CHECKS:
        assert find_spec(f"paceline.bench.gpu.{check.module}") is not None


def test_results_are_written_and_the_status_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs GPUs says so, and is not taken for a fault."""
    command = ["gpu-check", "--device", "cpu", "--only", "ipc", "--only", "peer", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    assert main() == 0
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["seed"] == 5
    assert "no CUDA IPC" in written["checks"]["ipc"]["skipped"]
    assert "two GPUs" in written["checks"]["peer"]["skipped"]


def test_a_check_that_breaks_or_hangs_is_an_error() -> None:
    now = time.monotonic()
    assert "not done within 0 seconds" in run_check(Check("ipc", 0.05), "cpu", 0, now + 60)["error"]
    assert run_check(Check("ipc", 300), "cpu", 0, now)["error"] == "no time was left"
    broken = (
        Check("nothing", 300, "a", together=True),
        Check("nothing", 300, "b"),
        Check("ipc", 300),
    )
    found = {check.name: facts for check, facts in run_checks(broken, "cpu", 0)}
    assert list(found) == ["nothing a", "nothing b", "ipc"]
    assert "No module named" in found["nothing a"]["error"]
    assert "skipped" in found["ipc"], "one that breaks does not stop the others"


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--output", str(tmp_path)])
    assert main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
