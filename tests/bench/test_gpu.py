"""`make gpu-check`: its measurements, and what it needs on a machine with other packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.gpu import __main__ as gpu
from paceline.bench.gpu import services

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
import paceline.bench.gpu.__main__
from paceline.cli.main import COMMANDS, build_parser
from paceline.drafter.methods import method_class, method_names

build_parser([command for command in COMMANDS if command.name in ("verifier", "drafter")])
for name in ("verifier", "drafter", "client", "harness", "verifier.kv.pool", "cuda.memory"):
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
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_results_are_written_and_failures_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.MEASUREMENTS, "nothing", (lambda device: None, 300.0))
    command = ["gpu", "--device", "cpu", "--only", "nothing", "--only", "bits", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path)])
    assert gpu.main() == 1
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert written["seed"] == 5
    assert "invalid choice" in written["results"]["nothing"]["error"]
    assert "interpreter" in written["results"]["bits"]["skipped"]
    assert "took more than 0.05 seconds" in gpu.run("bits", "cpu", 0, 0.05)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*gpu.MEASUREMENTS} - {"bits"}))
def test_a_measurement_ends_well_on_a_cpu(name: str) -> None:
    """Its process fails if a text depends on the drafter; models are small, and texts few."""
    found = gpu.run(name, "cpu", 0, 400.0)
    assert "error" not in found, found
    if name == "rounds":
        assert found["left_out"] == []
        for sampling in services.SAMPLING:
            plain, counted = (found[f"2 x {name}, {sampling}"] for name in ("none", "count"))
            assert plain["tokens_a_round"] == 1
            assert counted["tokens_a_round"] > 2, "most drafted tokens are right"
            times = found[f"1 x dspark, {sampling}"]
            ratio = times["round_us"] / found[f"1 x none, {sampling}"]["round_us"]
            assert times["round_over_plain"] == pytest.approx(ratio, abs=0.001)
    elif name == "products":
        integers = [facts for key, facts in found.items() if "rotated" in key]
        assert [facts["rows_with_other_bits"] for facts in integers] == [[]] * 6
    elif name == "texts":
        assert all(each["different"] == 0 for key, each in found.items() if "at once" in key)
