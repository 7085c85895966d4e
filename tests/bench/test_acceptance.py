"""`paceline bench acceptance` and `paceline bench quality`, on small models."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.acceptance import run
from paceline.bench.cli import add_arguments
from paceline.bench.quality import compare, predictions
from paceline.convert import load_decoder

_DEMO = Path("models/demo")


def test_drafters_are_measured_on_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(json.dumps({"text": "def add(a, b):\n    return"}) + "\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    twice = [f"{name}=lm:{_DEMO / 'lm'},widths=2,2" for name in ("first", "second")]
    words = ["acceptance", "--models", _DEMO, "--weights", "bfloat16", "--tokens", "24"]
    words += ["--prompts", prompts, "--output", tmp_path / "found.json", "--temperature", "0"]
    words += [word for spec in twice for word in ("--drafter", spec)]
    assert run(parser.parse_args([str(word) for word in words])) == 0
    [(title, entry)] = json.loads((tmp_path / "found.json").read_text())["results"].items()
    assert title == "mine, T = 0, bfloat16"
    assert entry["drafters"]["first"] == entry["drafters"]["second"]
    assert entry["drafters"]["first"]["accepted_length"] >= 1
    assert "second" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=96,
        num_attention_heads=2, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


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
