"""`make gpu-check`: its measurements, and what it needs on a machine with other packages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.gpu import profiles, rounds, start, texts
from paceline.bench.gpu.__main__ import MEASUREMENTS, main, run

TESTS = Path(__file__).parents[1] / "gpu"

BLOCKER = """
import importlib.abc, importlib.metadata, sys

MISSING = {
    "accelerate", "aiohttp", "grpc_tools", "hypothesis", "llguidance", "openai",
    "opentelemetry", "prometheus_client", "pydantic", "shtab", "uvloop",
}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
version = importlib.metadata.version
def no_paceline(name):
    if name == "paceline":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = no_paceline
"""

IMPORTS = """
import importlib
from pathlib import Path
from paceline.bench.gpu.__main__ import MEASUREMENTS
from paceline.cli.main import COMMANDS, build_parser
from paceline.drafter.methods import method_class, method_names

for module in MEASUREMENTS:
    importlib.import_module(f"paceline.bench.gpu.{module}")
build_parser([command for command in COMMANDS if command.name in ("verifier", "drafter")])
for name in ("verifier", "drafter", "client", "harness", "verifier.kv.pool", "kv.cuda"):
    importlib.import_module(f"paceline.{name}")
for name in method_names():
    method_class(name)
tests = Path(sys.argv[1])
sys.path[:0] = [str(tests / "kernels"), str(tests / "processes")]
for file in tests.glob("*/*.py"):
    importlib.import_module(file.stem)
from gpu_services import demo_jobs, require_services
require_services()
assert len(demo_jobs()) == 4
"""


def test_neither_telemetry_nor_tools_nor_an_installation_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + IMPORTS, str(TESTS)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_results_are_written_and_failures_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEASUREMENTS, "nothing", 300.0)
    command = ["gpu", "--device", "cpu", "--only", "nothing", "--only", "bits", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    assert main() == 1
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["seed"] == 5
    assert "No module named" in written["results"]["nothing"]["error"]
    assert "interpreter" in written["results"]["bits"]["skipped"]
    assert "took more than 0.05 seconds" in run("bits", "cpu", 0, 0.05)["error"]


@pytest.mark.slow
def test_rounds_are_measured_by_their_parts() -> None:
    """With a small target on the CPU: its process fails if a text depends on the drafter."""
    found = run("rounds", "cpu", 0, 400.0)
    assert "error" not in found, found
    for sampling in ("T = 0", "top-p"):
        plain, counted = (found[f"2 x {name}, {sampling}"] for name in ("none", "count"))
        assert plain["tokens_a_round"] == 1
        assert counted["tokens_a_round"] > 2, "most drafted tokens are right"
        for drafter in ("count", "longspec", "dspark"):
            times = found[f"1 x {drafter}, {sampling}"]
            assert times["rounds"] > 0
            assert times["draft_us"] > 0
    assert found["transformers"]["ms_a_token"] > 0


def test_a_case_without_a_figure_misses_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """With no time left, every target is missed, and the process must fail."""
    missed = asyncio.run(
        rounds.measure_all(
            "127.0.0.1:1", "127.0.0.1:1", ["count", "longspec", "dspark"],
            rounds.EIGHT_BILLION, 0.0, None,
        )
    )  # fmt: skip
    assert len(missed) == len(rounds.TARGETS)
    assert all(each.endswith("has no figure") for each in missed)
    assert "left out" in capsys.readouterr().out


@pytest.mark.slow
def test_texts_of_the_demo_are_compared_in_all_ways() -> None:
    found = run("texts", "cpu", 0, 300.0)
    assert "error" not in found, found
    cases = [name for name in found if "at once" in name]
    formats, ways = len(texts.FORMATS), len(texts.AT_ONCE) * (1 + len(texts.DRAFTERS)) - 1
    assert len(cases) == formats * ways
    assert all(found[name]["different"] == 0 for name in cases)


@pytest.mark.slow
def test_a_start_is_measured_cold_and_warm() -> None:
    found = run("start", "cpu", 0, 150.0)
    assert "error" not in found, found
    for name in ("seconds_to_start_cold", "seconds_to_start_warm"):
        parts = found[name]
        assert parts["both"] == pytest.approx(parts["verifier"] + parts["drafter"], abs=0.2)


@pytest.mark.parametrize(("seconds", "count"), [(20.0, 0), (20.1, 1)])
def test_a_cold_start_has_a_target(seconds: float, count: int) -> None:
    assert len(start.missed({"both": seconds})) == count


def test_a_service_writes_a_profile_for_each_trigger(tmp_path: Path) -> None:
    trigger, output = tmp_path / "trigger", tmp_path / "profiles.txt"
    variables = profiles.install(tmp_path / "hook", "verifier", trigger, output)
    (trigger / "1 x none").touch()
    program = "import time\nfrom pathlib import Path\n" + (
        f"while not Path({str(output)!r}).exists():\n    time.sleep(0.01)\n"
    )
    paths = [str(tmp_path / "hook"), *sys.path]
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
        check=True,
        timeout=60,
    )
    assert "## verifier, 1 x none" in output.read_text()


def test_it_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path)])
    assert main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
