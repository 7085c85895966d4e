"""`make gpu-check`: its measurements, and what it needs on a machine with other packages."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from paceline.bench.gpu import __main__ as gpu
from paceline.bench.gpu import decoder, services
from paceline.bench.gpu.cases import EIGHT_BILLION, missed_targets

TESTS = Path(__file__).parents[1] / "gpu"
CUDA = torch.device("cuda")

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


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err


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


def test_a_large_figure_and_none_miss_a_target() -> None:
    targets = {("one", "ms"): 2.0, ("one", "us"): 5.0, ("two", "ms"): 1.0}
    assert not missed_targets({"one": {"ms": 2.0, "us": 4.9}, "two": {"ms": 0.0}}, targets)
    assert missed_targets({"one": {"ms": 2.1, "us": float("nan")}}, targets) == [
        "one: ms is 2.1, above 2",
        "one: us is nan, above 5",
        "two: ms has no figure",
    ]


def test_goals_of_usual_rounds_are_targets() -> None:
    """370 tokens a second for one user, and 1.8 and 1.5 times plain decoding for 8 and 32."""
    for name in ("longspec", "dspark"):
        one = services.TARGETS[f"1 x {name}, T = 0", "round_us"]
        assert services.USUAL_ROUND / one * 1e6 == pytest.approx(370)
        for users, speedup in ((8, 1.8), (32, 1.5)):
            ratio = services.TARGETS[f"{users} x {name}, T = 0", "round_over_plain"]
            assert services.USUAL_ROUND / ratio == pytest.approx(speedup)


def test_what_no_time_is_left_for_is_left_out() -> None:
    """Cases that have targets and those that have none."""
    address, names = "127.0.0.1:1", ["count", "longspec", "dspark"]
    found, left_out = asyncio.run(services.measure_all(address, address, names, EIGHT_BILLION, 0.0))
    assert not found
    cases = len(services.SEQUENCES) * 4
    assert len(left_out) == cases * len(services.SAMPLING)


MISSES = {
    "nothing": "",
    "a figure": "8 x longspec, T = 0: round_over_plain has no figure",
    "a start": f"{services.WARM}: verifier is .*, above -1",
    "a package": "transformers: it is not installed",
    "a case": "8 x none: no time is left",
}


@pytest.mark.parametrize("missing", MISSES)
def test_rounds_on_a_gpu_fail_where_anything_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without models and services, with figures that reach all targets."""
    found: dict[str, dict[str, float]] = {}
    for (case, part), limit in services.TARGETS.items():
        found.setdefault(case, {})[part] = limit
    left_out = ["8 x none: no time is left"] if missing == "a case" else []
    if missing == "a figure":
        found["8 x longspec, T = 0"].pop("round_over_plain")
    if missing == "a start":  # none takes less than no time
        start = services.WARM, "verifier"
        monkeypatch.setitem(services.TARGETS, start, services.TARGETS[start] - 26)

    async def measure_all(*_: object) -> tuple[dict[str, dict[str, float]], list[str]]:
        return found, left_out

    for name in ("write_target", "write_drafters", "ServiceProcess"):
        monkeypatch.setattr(services, name, MagicMock())
    monkeypatch.setattr(services, "measure_all", measure_all)
    monkeypatch.setattr(services, "transformers_rate", lambda *_: 20.0)
    if missing == "a package":
        monkeypatch.setattr(services, "find_spec", lambda name: None)
    if missing == "nothing":
        services.rounds(CUDA)
        return
    with pytest.raises(SystemExit, match=MISSES[missing]):
        services.rounds(CUDA)


@pytest.mark.parametrize("slow", [False, True])
def test_steps_and_starts_on_a_gpu_have_targets(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind contexts where a chunk of keys begins, and behind others."""

    def measure(config: Any, contexts: Any, *_: object) -> dict[str, dict[str, Any]]:
        figures = {"step_ms": 4.3 if slow else 4.1, "step_over_fast": 1.0, "64_nodes_over_step": 1}
        assert {n % 256 for n in contexts} > {0}
        return {f"{config.weights}, context {n}": figures for n in contexts}

    monkeypatch.setattr(decoder, "copy_bandwidth", lambda device: 3000.0)
    monkeypatch.setattr(decoder, "measure", measure)
    monkeypatch.setattr(services, "seconds_to_start", lambda *_: {"both": 20.0 + 0.1 * slow})
    if not slow:
        decoder.step(CUDA)
        services.start(CUDA)
        return
    with pytest.raises(SystemExit, match="int8, context 2048: step_ms is"):
        decoder.step(CUDA)
    with pytest.raises(SystemExit, match="seconds_to_start_cold: both is"):
        services.start(CUDA)


@pytest.mark.parametrize("differing", decoder.CONTEXTS)
def test_other_bits_in_any_format_of_weights_are_an_error(
    differing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "check", lambda config, *_: 3 * (config.weights == differing))
    with pytest.raises(SystemExit, match="3 rows differ"):
        decoder.bits(CUDA)


def test_services_on_a_gpu_fail_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    require_services = runpy.run_path(str(TESTS / "processes" / "gpu_services.py"))[
        "require_services"
    ]
    require_services()
    monkeypatch.setitem(require_services.__globals__, "_PACKAGES", ("grpc", "no_such_package"))
    outcomes = (pytest.fail.Exception, pytest.skip.Exception)
    with pytest.raises(outcomes, match="not installed: no_such_package") as caught:
        require_services()
    assert caught.type is pytest.fail.Exception
