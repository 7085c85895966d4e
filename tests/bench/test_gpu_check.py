"""The runner of the GPU checks: what fails or hangs takes nothing else along."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.bench.gpu.__main__ import LIMITS, TOTAL_SECONDS, main, run_check


def test_all_of_it_ends_within_ten_minutes() -> None:
    assert TOTAL_SECONDS < 600
    assert max(LIMITS.values()) < TOTAL_SECONDS / 2


def test_results_are_written_and_the_status_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["gpu-check", "--device", "cpu", "--only", "ipc", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    assert main() == 0
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["seed"] == 5
    assert "no CUDA IPC" in written["checks"]["ipc"]["skipped"]


def test_a_check_that_breaks_or_hangs_is_an_error() -> None:
    assert "nothing" in run_check("nothing", "cpu", 0, 60)["error"]
    assert "not done within 0 seconds" in run_check("ipc", "cpu", 0, 0.05)["error"]
    assert run_check("ipc", "cpu", 0, 0)["error"] == "no time was left"


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--output", str(tmp_path)])
    assert main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
