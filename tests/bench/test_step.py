"""`paceline bench step`: its figures and its roofline, on a tiny target."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.cli import add_arguments
from paceline.bench.step.engines import Library, LlamaCpp, PacelineEngine, TransformersEngine
from paceline.bench.step.parts import PARTS
from paceline.bench.step.roofline import Roofline
from paceline.bench.step.run import measure, run
from paceline.bench.table import program as program_of_the_table
from paceline.cli.command import CommandError
from paceline.cli.main import main
from paceline.convert import load_config
from paceline.kernels._compile import levels_here
from paceline.kernels._native import VARIABLE

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "target"
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=96,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def options(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(each) for each in arguments])


def test_engines_take_turns_and_find_the_same_figures(target: Path) -> None:
    paceline, other = PacelineEngine(target, "float32"), TransformersEngine(target, 96)
    done: list[str] = []
    cells = measure([paceline, other], (1, 4), (8, 300), 2, done.append)
    assert [line.rpartition(", ")[2] for line in done] == [
        *[paceline.name, other.name] * 2,
        *[other.name, paceline.name] * 2,
    ]
    for cell in cells.values():
        for figures in cell.values():
            assert set(figures) == {"prefill_s", "ms_1", "ms_4", "tokens_per_s"}
            assert all(0 < low <= middle <= high for low, middle, high in figures.values())


@needs_compiler
def test_a_run_records(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    shape = ("--rows", "1,256", "--contexts", "20,500", "--repeats", 2, "--weights", "float32")
    assert run(options("step", "--target", target, "--output", file, *shape)) == 0
    found = json.loads(file.read_text())["results"]["target"]
    assert list(found["quartiles"]) == ["20"], "a context that does not fit is left out"
    assert "paceline float32" in found["quartiles"]["20"]
    assert "paceline float32" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no context of \[500\] fits 512 positions"):
        run(options("step", "--target", target, "--output", file, *shape, "--contexts", "500"))


def test_synthetic_contexts_are_longer_than_the_model_and_cold_steps_are_figures(
    target: Path,
) -> None:
    engine = PacelineEngine(target, "float32", synthetic=True, cold=True)
    found = engine.measure(700, (1, 4))
    cold = {"ms_1_paused", "ms_1_behind_prompt"}
    assert set(found) == {"ms_1", "ms_4", "tokens_per_s", *cold}
    assert min(found.values()) > 0


def test_a_level_is_an_entry_and_a_resumed_run_keeps_it(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = levels_here()[0]
    monkeypatch.setenv(VARIABLE, level)  # restored behind the test
    file = tmp_path / "step.json"
    shape = ("--rows", "1", "--contexts", "20", "--repeats", 2, "--weights", "float32")
    given = ("step", "--target", target, "--output", file, *shape, "--synthetic")
    assert main(["bench", *map(str, given), "--levels", level]) == 0
    entries = json.loads(file.read_text())["results"]
    assert {name: entry["level"] for name, entry in entries.items()} == {f"target, {level}": level}
    before = file.stat().st_mtime_ns
    assert run(options(*given, "--levels", level, "--resume")) == 0
    assert file.stat().st_mtime_ns == before, "nothing is measured twice"
    with pytest.raises(CommandError, match="--levels avx9: expected some of"):
        run(options(*given, "--levels", "avx9"))


@needs_compiler
def test_the_parts_of_a_step_are_its_time(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    shape = ("--rows", "1,16", "--contexts", "20", "--weights", "float32", "--profile")
    assert run(options("step", "--target", target, "--output", file, *shape)) == 0
    entry = json.loads(file.read_text())["results"]["target, parts"]
    parts = entry["medians"]["20"]["paceline float32"]
    assert set(parts) == {"ms_1", "ms_16"}
    assert all(len(each) == len(PARTS) and min(each) > 0 for each in parts.values())
    printed = capsys.readouterr().out
    assert all(name in printed for name in PARTS)


@needs_compiler
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the probe is for x86-64")
def test_rates_of_this_machine_are_measured(target: Path) -> None:
    roofline = Roofline(load_config(target, "float32"), "int8", "avx2", 1)
    found = roofline.measure(20, (1, 300))
    assert set(found) > {"prefill_s", "ms_1", "ms_300", "tokens_per_s"}
    assert min(found.values()) > 0


@pytest.mark.parametrize(("weights", "size"), [("float32", 4), ("int8", 1.0)])
def test_a_step_is_bound_by_bytes_or_by_operations(
    target: Path, weights: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = load_config(target, "float32"), LlamaForCausalLM.from_pretrained(target)
    matrices = [each for each in model.parameters() if each.dim() == 2]
    count = sum(each.numel() for each in matrices) - model.model.embed_tokens.weight.numel()
    roofline = Roofline(config, weights, "avx2", 1)

    def ms(read: float, linear: float, attention: float, context: int, rows: int) -> float:
        monkeypatch.setattr(roofline, "_rates", lambda: [read, linear, attention])
        return roofline.measure(context, (rows,))[f"ms_{rows}"] * 1e6

    unbound = float("inf")
    kv = config.kv_bytes_per_token
    assert ms(1, unbound, unbound, 100, 8) == pytest.approx(count * size + 100 * kv)
    assert ms(unbound, 1, unbound, 100, 8) == pytest.approx(2 * 8 * count)
    one = 4 * config.layers * config.q_heads * config.head_dim
    assert ms(unbound, unbound, 1, 100, 8) == pytest.approx(one * 8 * 101)
    head = config.hidden * config.vocab_size
    chunk = 256 * (count - head) + head
    assert ms(unbound, 1, unbound, 0, 256) == pytest.approx(2 * chunk), "one row has logits"


def program(folder: Path, name: str, body: str) -> str:
    """An executable that gets its arguments as `arguments` and prints `result` as JSON."""
    file = folder / name
    head = f"#!{sys.executable}\nimport json, sys\narguments = sys.argv[1:]\n"
    file.write_text(f"{head}{body}\nprint(json.dumps(result))\n")
    file.chmod(0o755)
    return str(file)


def test_other_engines_are_programs(tmp_path: Path) -> None:
    body = """
given = dict(zip(arguments[::2], arguments[1::2]))
rows = [int(each) for each in given["-p"].split(",")]
result = [{"n_prompt": each, "n_gen": 0, "avg_ns": each * 1e6, "avg_ts": 0} for each in rows]
if given["-n"] != "0":
    assert given["-d"] == "128"
    result.append({"n_prompt": 0, "n_gen": int(given["-n"]), "avg_ns": 0, "avg_ts": 64.0})
"""
    llama = LlamaCpp(program(tmp_path, "llama-bench", body), Path("small.gguf"), 2)
    assert llama.name == "llama.cpp small"
    expected = {"prefill_s": 0.128, "ms_1": 1.0, "ms_33": 33.0, "tokens_per_s": 64.0}
    assert llama.measure(128, (1, 33)) == expected


LIBRARY = """
import time


class IkLlama:
    def __init__(self, path, *, n_ctx, n_threads, verbose):
        print(path, n_ctx, n_threads)  # libraries print
        self._context = self

    def sample(self, *arguments, **named):
        return 7

    def generate(self, tokens, *, max_tokens, **sampling):
        time.sleep(0.0001 * len(tokens))
        return [self._context.sample(-1) for _ in range(max_tokens) if not time.sleep(0.001)]
"""


def test_a_library_is_timed_in_a_process_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ik_llama_cpp.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = Path("small.gguf")
    engine = Library("ik_llama.cpp small", "ik_llama", sys.executable, model, 96)
    first, second = engine.measure(100, (1, 33)), engine.measure(200, (1, 33))
    assert first.keys() == second.keys() == {"prefill_s", "tokens_per_s"}
    assert 0 < first["tokens_per_s"] < 2000, "each token takes a millisecond"
    broken = Library("x", "ik_llama", "false", model, 96)
    with pytest.raises(OSError, match="x ended with code 1"):
        broken.measure(100, (1,))


def test_unknown_weights_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert options("step", "--weights", "int8,int4").weights == ["int8", "int4"]
    with pytest.raises(SystemExit):
        options("step", "--weights", "int8,int3")
    assert "unknown weights int3" in capsys.readouterr().err


def test_a_program_that_is_started_by_its_path_finds_pythons_own_modules() -> None:
    beside = {file.stem for file in Path(program_of_the_table.__file__).parent.glob("*.py")}
    assert not beside & sys.stdlib_module_names, "its folder is the first on the path"
