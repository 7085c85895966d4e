"""`paceline bench acceptance`, `quality` and `step`, on small models."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from transformers import LlamaForCausalLM

from paceline.bench import acceptance
from paceline.bench.cli import add_arguments
from paceline.bench.quality import compare, predictions
from paceline.bench.step.run import run
from paceline.convert import load_decoder

_DEMO = Path("models/demo")


def options(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(each) for each in words])


def test_drafters_are_measured_on_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(json.dumps({"text": "def add(a, b):\n    return"}) + "\n")
    twice = [f"{name}=lm:{_DEMO / 'lm'},widths=2,2" for name in ("first", "second")]
    words = ["acceptance", "--models", _DEMO, "--weights", "bfloat16", "--tokens", "24"]
    words += ["--prompts", prompts, "--output", tmp_path / "found.json", "--temperature", "0"]
    words += [word for spec in twice for word in ("--drafter", spec)]
    assert acceptance.run(options(*words)) == 0
    [(title, entry)] = json.loads((tmp_path / "found.json").read_text())["results"].items()
    assert title == "mine, T = 0, bfloat16"
    assert entry["drafters"]["first"] == entry["drafters"]["second"]
    assert entry["drafters"]["first"]["accepted_length"] >= 1
    assert "second" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model") / "target", "Llama", vocab_size=96, hidden_size=32,
        intermediate_size=48, head_dim=16, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip


def test_a_model_differs_from_itself_in_nothing(folder: Path) -> None:
    exact, rounded = load_decoder(folder, "float32"), load_decoder(folder, "bfloat16")
    text = torch.randint(96, (2, 64))
    base = [predictions(exact, window) for window in text]
    same = compare(base, exact, text)
    assert same["kl_divergence"] == pytest.approx(0, abs=1e-6)
    assert same["perplexity"] == same["base_perplexity"] > 1
    assert same["same_top"] == 1
    near = compare(base, rounded, text)
    assert 0 < near["kl_divergence"] < 0.1
    kv = compare(base, load_decoder(folder, "float32", kv_cache_dtype="int8"), text)
    assert 0 < kv["kl_divergence"] < 0.1
    assert near["base_perplexity"] == same["perplexity"] != near["perplexity"]
    with torch.inference_mode():
        model = LlamaForCausalLM.from_pretrained(folder)
        logits = model(text).logits[:, 32:-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, text[:, 33:].flatten())
    assert same["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-3)


def test_a_run_of_steps_records(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    shape = ("--rows", "1,256", "--contexts", "20,1000", "--repeats", 2, "--weights", "float32")
    assert run(options("step", "--target", folder, "--output", file, *shape)) == 0
    found = json.loads(file.read_text())["results"]["target"]
    assert list(found["quartiles"]) == ["20"], "a context that does not fit is left out"
    assert "paceline float32" in found["quartiles"]["20"]
    assert "paceline float32" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no context of \[1000\] fits 1024 positions"):
        run(options("step", "--target", folder, "--output", file, *shape, "--contexts", "1000"))
