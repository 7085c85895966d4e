"""`paceline bench step`: its figures on a tiny target."""

import argparse
import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.cli import add_arguments
from paceline.bench.step.run import run


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
