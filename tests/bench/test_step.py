"""`paceline bench step`: its figures and its roofline, on a tiny target."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.cli import add_arguments
from paceline.bench.step.roofline import Roofline
from paceline.bench.step.run import run
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


@pytest.mark.parametrize(("weights", "size"), [("float32", 4), ("int8", 1.0)])
def test_a_step_is_bound_by_bytes_or_by_operations(
    target: Path, weights: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = load_config(target, "float32"), LlamaForCausalLM.from_pretrained(target)
    matrices = [each for each in model.parameters() if each.dim() == 2]
    count = sum(each.numel() for each in matrices) - model.model.embed_tokens.weight.numel()
    roofline = Roofline(config, weights, "avx2", 1, Path())

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
