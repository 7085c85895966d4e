"""`paceline bench quality`: divergence and perplexity, on a tiny target."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.quality import WINDOW, compare, held_out, llama_cpp, predictions
from paceline.convert import load_decoder

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=96,
        num_attention_heads=2, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_second_half_of_a_window_is_predicted_as_by_transformers(folder: Path) -> None:
    window = torch.randint(96, (600,))
    found = predictions(load_decoder(folder, "float32"), window)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        expected = model(window[None]).logits[0].log_softmax(-1)[300:-1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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


def test_the_text_is_prose_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(TARGET.parents[2])
    text = held_out(TARGET, 2)
    assert text.shape == (2, WINDOW)
    assert len(text[0].unique()) > 100
    assert not torch.equal(text[0], text[1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run in a source checkout"):
        held_out(TARGET, 2)


PERPLEXITY = """#!{python}
import pathlib, sys
given = sys.argv[1:]
base = pathlib.Path(given[given.index("--kl-divergence-base") + 1])
if "--kl-divergence" not in given:
    base.write_text(pathlib.Path(given[given.index("-f") + 1]).read_text())
    sys.exit()
assert base.read_text() == 2 * "some text"
if "-m q8.gguf" not in " ".join(given):
    sys.exit()
print("Mean PPL(Q)                   :  15.5 ±   0.9\\nMean PPL(base)      :  15.25 ±   0.9")
print("Mean    KLD:   0.004750 ±   0.0001\\nMaximum KLD:   0.3\\nSame top p: 97.500 ± 0.2 %")
"""


def test_figures_of_llama_cpp_are_read_from_its_output(tmp_path: Path) -> None:
    program = tmp_path / "llama-perplexity"
    program.write_text(PERPLEXITY.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(ValueError, match="measured nothing"):
        llama_cpp(str(program), [Path("base.gguf"), Path("unknown.gguf")], "some text", 4)
    found = llama_cpp(str(program), [Path("base.gguf"), Path("q8.gguf")], "some text", 4)
    assert found == {
        "llama.cpp q8": {
            "kl_divergence": 0.00475,
            "perplexity": 15.5,
            "base_perplexity": 15.25,
            "same_top": 0.975,
        }
    }
