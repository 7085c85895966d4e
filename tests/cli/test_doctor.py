"""`paceline doctor` as a process."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.test_main import run_client_only
from paceline.cli.doctor import examine
from paceline.kernels import cpu_kernels

DEMO = Path(__file__).parents[2] / "models" / "demo"


def doctor(*words: str, level: str = "", **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if "MAX_CPU_ISA" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "doctor", *words],
        env=environment | {"PACELINE_CPU_LEVEL": level} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def facts(level: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor("--json", level=level))
    return found


def test_the_machine_the_install_and_compiled_kernels() -> None:
    found = facts(cpu_kernels().level)
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert found["processor"]["cores"] == os.cpu_count()
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    assert found["missing"] == {}
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["kernels"]["level"] == cpu_kernels().level
    assert found["kernels"]["error"] == ""
    assert "no service starts" not in str(found["notes"])


def test_a_gpu_and_its_backend_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("PACELINE_ATTENTION", "triton")
    (found,) = examine()["gpus"]
    assert (found["compute_capability"], found["attention"]) == ("9.0", "triton")
    monkeypatch.setenv("PACELINE_ATTENTION", "fastest")
    assert "PACELINE_ATTENTION is 'fastest', expected" in examine()["gpus"][0]["attention"]


def test_missing_kernels_are_noted(tmp_path: Path) -> None:
    without = {"CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    found = json.loads(doctor("--json", **without))
    assert found["kernels"]["level"] == ""
    (note,) = (note for note in found["notes"] if "no service starts" in note)
    assert "Install gcc" in note
    assert "wheel" in note


def test_a_verifier_without_kernels_ends_with_one_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paceline.cli.main", "verifier", "--address=127.0.0.1:0"),
            f"--target={DEMO / 'target'}",
        ],
        env=os.environ | {"CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (error,) = (line for line in done.stderr.splitlines() if "ERROR" in line)
    assert "cannot serve: the CPU kernels are not compiled" in error
    assert "Traceback" not in done.stderr


def test_an_unsupported_level_is_a_note() -> None:
    assert "no service starts: PACELINE_CPU_LEVEL is 'mmx'" in doctor(level="mmx")


def test_an_installation_of_the_client_alone() -> None:
    done = run_client_only("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "torch" in found["missing"]["server"]
    assert "kernels" not in found
    assert any("pip install 'paceline[server]'" in note for note in found["notes"])
