"""SpecAttn's figures, on a tiny target."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench import selfspec
from paceline.bench.texts import Text
from paceline.decoder import load_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_policies_are_compared_on_the_same_text(target: Path) -> None:
    texts = [Text("some", "a", torch.arange(200).remainder(50).tolist())]
    found = selfspec.accepted(target, texts, dtype="float32", tokens=24, progress=lambda _: None)
    for heat in ("T=0", "T=1"):
        cells = found["some"][heat]
        assert set(cells) == {*selfspec.policies(2), "all positions"}
        lengths = {name: cell["accepted_length"] for name, cell in cells.items()}
        assert lengths["all positions"] == selfspec.DEPTH + 1, "it is the target itself"
        assert all(1 <= length <= selfspec.DEPTH + 1 for length in lengths.values())


def test_costs_are_of_every_policy_and_context(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfspec, "COLLECTED", (64, 128))
    monkeypatch.setattr(selfspec, "CONTEXT", 128)
    monkeypatch.setattr(selfspec, "_STEPS", 3)
    found = selfspec.costs(target, "float32")
    assert [row["context"] for row in found["collection"]] == [64, 128]
    for row in found["collection"]:
        assert set(row) == {*selfspec.policies(2), "context", "verify_ms"} - {"streaming"}
    assert found["attention"]["positions"] == 9
    assert found["attention"]["full_ms"] > 0


def test_a_longer_target_has_the_same_weights(target: Path, tmp_path: Path) -> None:
    longer = selfspec.lengthened(target, tmp_path / "longer", 512)
    assert load_config(longer).max_position == 512
    rope = json.loads((longer / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 2.0)
    weights = "model.safetensors"
    assert (longer / weights).read_bytes() == (target / weights).read_bytes()
