"""Published weights: the same bits, in memory that nobody can change."""

import os
from pathlib import Path

import pytest
import torch

from paceline.decoder import (
    Decoder,
    LocalCache,
    PackedWeights,
    open_model,
    packed,
    publish,
)
from paceline.decoder.weights import Linear, plain
from paceline.kernels import Executor, Heads, Pass, QueryBlock, Recorder, plan_trees
from paceline.kernels.rotated import RotatedMatrix

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"


def logits(decoder: Decoder) -> torch.Tensor:
    cache = LocalCache(decoder.config)
    cache.reserve(9)
    tokens = torch.arange(9)
    plan = plan_trees([QueryBlock(0, 0, None, 9)])
    return decoder.forward(tokens, plan, [cache], logit_rows=None).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_over_published_weights_has_the_same_bits(
    models: dict[str, Path], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Decoder.load(models[name], dtype)
    file = publish(own.large_tensors())
    try:
        found = PackedWeights(file)
        assert logits(Decoder.load(models[name], dtype, shared=found)).equal(logits(own))
        with pytest.raises(KeyError):
            found.get("layers.99.qkv")
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(file, b"x", 0)
        with monkeypatch.context() as other:
            other.setattr(packed, "_layout", lambda: "another")
            with pytest.raises(ValueError, match="same version"):
                PackedWeights(file)
    finally:
        os.close(file)
    shared = Decoder.load(models[name], dtype, shared=found)
    del found
    assert logits(shared).equal(logits(own)), "a mapping outlives the descriptor"


def test_other_memory_is_refused(tmp_path: Path) -> None:
    file = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    with pytest.raises(ValueError, match="not sealed"):
        PackedWeights(file)
    os.close(file)
    (tmp_path / "file").write_bytes(b"x" * 4096)
    with (tmp_path / "file").open("rb") as opened, pytest.raises(OSError, match="Invalid"):
        PackedWeights(opened.fileno())


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_tied_embedding_is_in_memory_once(weights: str) -> None:
    """Rows for the lookup come from the packed head, in calls and in programs."""
    source = open_model(TARGET)
    decoder = Decoder.load(source, weights)
    assert "embedding" not in decoder.large_tensors()
    stored = source.weights(decoder.config)["model.embed_tokens.weight"]
    tokens = torch.tensor([0, 9, decoder.config.vocab_size - 1])
    expected = plain(stored, torch.float32)
    if weights == "int8":
        expected = RotatedMatrix.of(expected).rows(tokens)
        assert (expected - plain(stored, torch.float32)[tokens]).abs().max() < 0.01
    else:
        expected = expected[tokens]
    assert decoder.embed(tokens).equal(expected)
    config = decoder.config
    program = Recorder(Heads(config.q_heads, config.kv_heads, config.head_dim), torch.float32)
    x = program.embed(decoder.large_tensors()["head"])
    program.multiply(program.select(x), Linear(torch.eye(config.hidden)))
    plan, cache = plan_trees([QueryBlock(0, 0, None, 3)]), LocalCache(decoder.config)
    table = torch.zeros(4, config.head_dim)
    found = Executor(program.finish()).run(Pass(tokens, plan, [cache], table)).logits
    torch.testing.assert_close(found, expected)
