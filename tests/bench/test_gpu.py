"""`make gpu-check`: its measurements, and what it needs on a machine with other packages."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench.gpu import bits, profiles, rounds, start, step, texts
from paceline.bench.gpu.__main__ import MEASUREMENTS, main, run
from paceline.bench.gpu.cases import EIGHT_BILLION, missed_targets
from paceline.decoder import DecoderConfig

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
def test_products_bits_and_steps_end_well_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = [word for name in ("products", "bits", "step") for word in ("--only", name)]
    monkeypatch.setattr(sys, "argv", ["gpu", "--device=cpu", *only, "--output", str(tmp_path)])
    for name in ("products", "bits", "step"):
        monkeypatch.setitem(MEASUREMENTS, name, 300.0)
    assert main() == 0
    found = json.loads((tmp_path / "cpu.json").read_text())["results"]
    products = {name: facts for name, facts in found["products"].items() if name != "seconds"}
    assert len(products) == 6 * 4
    for name, facts in products.items():
        assert list(facts["us"]) == ["1", "8", "16", "64", "128", "288", "512"], name
    integers = [facts for name, facts in products.items() if "rotated" in name]
    assert [facts["rows_with_other_bits"] for facts in integers] == [[]] * 6
    for weights in ("float32", "int8"):
        figures = found["step"][f"{weights}, context 300"]
        assert figures["step_ms"] == figures["ms_by_nodes"]["1"] > 0
    assert found["step"]["float32, weight_bytes"] == 4 * found["step"]["int8, weight_bytes"]


@pytest.mark.slow
def test_rounds_are_measured_by_their_parts() -> None:
    """With a small target on the CPU: its process fails if a text depends on the drafter."""
    found = run("rounds", "cpu", 0, 400.0)
    assert "error" not in found, found
    assert found["left_out"] == []
    assert found[rounds.WARM]["verifier"] > 0
    for sampling in ("T = 0", "top-p"):
        plain, counted = (found[f"2 x {name}, {sampling}"] for name in ("none", "count"))
        assert plain["tokens_a_round"] == 1
        assert counted["tokens_a_round"] > 2, "most drafted tokens are right"
        for drafter in ("count", "longspec", "dspark"):
            times = found[f"1 x {drafter}, {sampling}"]
            assert times["rounds"] > 0
            assert times["draft_us"] > 0
            ratio = times["round_us"] / found[f"1 x none, {sampling}"]["round_us"]
            assert times["round_over_plain"] == pytest.approx(ratio, abs=0.001)
        for name in ("none", "count"):
            assert found[f"32 x {name}, {sampling}"]["rounds"] > 0
    assert found["transformers"]["ms_a_token"] > 0


def test_what_no_time_is_left_for_is_left_out(tmp_path: Path) -> None:
    """Cases that have targets and those that have none, and profiles."""
    found, left_out = asyncio.run(
        rounds.measure_all(
            "127.0.0.1:1", "127.0.0.1:1", ["count", "longspec", "dspark"],
            EIGHT_BILLION, 0.0, tmp_path,
        )
    )  # fmt: skip
    assert not found
    cases = len(rounds.SEQUENCES) * 4
    assert len(left_out) == cases * len(rounds.SAMPLING) + cases
    assert {"8 x none, T = 0: no time is left", "8 x count, top-p: no time is left"} < {*left_out}
    assert not list(tmp_path.iterdir())


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
        one = rounds.TARGETS[f"1 x {name}, T = 0", "round_us"]
        assert rounds.USUAL_ROUND / one * 1e6 == pytest.approx(370)
        for users, speedup in ((8, 1.8), (32, 1.5)):
            ratio = rounds.TARGETS[f"{users} x {name}, T = 0", "round_over_plain"]
            assert rounds.USUAL_ROUND / ratio == pytest.approx(speedup)


class IdleService:
    """What starts a service, without one."""

    address = "127.0.0.1:1"

    def __init__(self, *_: object, **__: object) -> None:
        """Take any arguments."""

    def __enter__(self) -> IdleService:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to stop."""


@pytest.fixture
def rounds_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """Rounds without models and services, which reach all targets; returns their figures."""
    found: dict[str, dict[str, float]] = {}
    for (case, part), limit in rounds.TARGETS.items():
        found.setdefault(case, {})[part] = limit

    async def measure_all(*_: object) -> tuple[dict[str, dict[str, float]], list[str]]:
        return found, []

    monkeypatch.setattr(sys, "argv", ["rounds", "cuda", "0"])
    monkeypatch.setattr(rounds, "arguments", lambda: torch.device("cuda"))
    monkeypatch.setattr(rounds, "write_target", lambda *_: None)
    monkeypatch.setattr(rounds, "write_drafters", lambda *_: {})
    monkeypatch.setattr(rounds, "ServiceProcess", IdleService)
    monkeypatch.setattr(rounds, "measure_all", measure_all)
    monkeypatch.setattr(rounds, "transformers_rate", lambda *_: 20.0)
    return found


def test_rounds_on_a_gpu_end_well_with_every_figure(
    rounds_on_a_gpu: dict[str, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    rounds.main()
    assert rounds.WARM in capsys.readouterr().out


def test_rounds_on_a_gpu_fail_without_a_figure(
    rounds_on_a_gpu: dict[str, dict[str, float]],
) -> None:
    rounds_on_a_gpu["8 x longspec, T = 0"].pop("round_over_plain")
    with pytest.raises(SystemExit, match="8 x longspec, T = 0: round_over_plain has no figure"):
        rounds.main()


@pytest.mark.usefixtures("rounds_on_a_gpu")
def test_rounds_on_a_gpu_fail_after_a_slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compiles no kernels; no start takes less than no time."""
    start = rounds.WARM, "verifier"
    monkeypatch.setitem(rounds.TARGETS, start, rounds.TARGETS[start] - 26)
    with pytest.raises(SystemExit, match=f"{rounds.WARM}: verifier is .*, above -1"):
        rounds.main()


@pytest.mark.usefixtures("rounds_on_a_gpu")
def test_rounds_on_a_gpu_fail_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="transformers: it is not installed"):
        rounds.main()


def test_rounds_on_a_gpu_fail_where_a_case_was_left_out(
    rounds_on_a_gpu: dict[str, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure_all(*_: object) -> tuple[dict[str, dict[str, float]], list[str]]:
        return rounds_on_a_gpu, ["8 x none: no time is left"]

    monkeypatch.setattr(rounds, "measure_all", measure_all)
    with pytest.raises(SystemExit, match="8 x none: no time is left"):
        rounds.main()


@pytest.mark.parametrize("slow", [False, True])
def test_steps_on_a_gpu_have_targets_in_both_formats(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind contexts where a chunk of keys begins, and behind others."""

    def measure(
        config: DecoderConfig, contexts: Sequence[int], *_: object
    ) -> dict[str, dict[str, Any]]:
        figures = {"step_ms": 4.3 if slow else 4.1, "step_over_fast": 1.0, "64_nodes_over_step": 1}
        assert {n % 256 for n in contexts} > {0}
        return {f"{config.weights}, context {n}": figures for n in contexts}

    monkeypatch.setattr(step, "arguments", lambda: torch.device("cuda"))
    monkeypatch.setattr(step, "copy_bandwidth", lambda device: 3000.0)
    monkeypatch.setattr(step, "measure", measure)
    if slow:
        with pytest.raises(SystemExit, match="int8, context 2048: step_ms is"):
            step.main()
    else:
        step.main()


@pytest.mark.parametrize("differing", bits.CONTEXTS)
def test_other_bits_in_any_format_of_weights_are_an_error(
    differing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bits, "arguments", lambda: torch.device("cuda"))
    monkeypatch.setattr(bits, "check", lambda config, *_: 3 * (config.weights == differing))
    assert list(bits.CONTEXTS) == ["bfloat16", "int8"]
    with pytest.raises(SystemExit, match="3 rows differ"):
        bits.main()


@pytest.mark.slow
def test_drafts_are_measured_in_both_formats_of_weights() -> None:
    found = run("drafts", "cpu", 0, 300.0)
    assert "error" not in found, found
    for drafter in ("longspec", "dspark"):
        for weights in ("bfloat16", "int8"):
            assert found[f"2 x {drafter}, {weights}"]["draft_ms"] > 0


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


@pytest.mark.parametrize("seconds", [20.0, 20.1])
def test_a_cold_start_has_a_target(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "arguments", lambda: torch.device("cuda"))
    monkeypatch.setattr(start, "start", lambda *_: {"both": seconds})
    if seconds > 20:
        with pytest.raises(SystemExit, match="seconds_to_start_cold: both is"):
            start.main()
    else:
        start.main()


def test_services_on_a_gpu_fail_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    file = TESTS / "processes" / "gpu_services.py"
    services = runpy.run_path(str(file))
    require_services = services["require_services"]
    require_services()
    monkeypatch.setitem(require_services.__globals__, "_PACKAGES", ("grpc", "no_such_package"))
    outcomes = (pytest.fail.Exception, pytest.skip.Exception)
    with pytest.raises(outcomes, match="not installed: no_such_package") as caught:
        require_services()
    assert caught.type is pytest.fail.Exception


def test_a_service_writes_a_profile_for_each_trigger(tmp_path: Path) -> None:
    trigger, output = tmp_path / "trigger", tmp_path / "profiles.txt"
    variables = profiles.install(tmp_path / "hook", "verifier", trigger, output)
    (trigger / "1 x none").touch()
    program = "import time\nfrom pathlib import Path\n" + (
        f"file = Path({str(output)!r})\n"
        "while not file.exists() or not file.stat().st_size:\n    time.sleep(0.01)\n"
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
