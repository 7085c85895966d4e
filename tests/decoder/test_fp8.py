"""Weights in 8-bit floats: products against float64, a decoder against bfloat16, what is refused.

Only GPUs serve them. PyTorch has the same products on a CPU, so the decoder runs there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_cases import ask_tree, extend, random_tokens, save_model

from paceline.decoder import Decoder, LocalCache, UnsupportedModelError, open_model
from paceline.kernels.float8 import Float8Matrix, quantise_rows

PARENTS = (-1, 0, 0, 1, 2, 2, 3)


def test_products_are_those_of_the_rounded_factors() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 320).bfloat16(), torch.randn(9, 320).bfloat16()
    x[3] *= 1e4  # a row that must not change the others
    bias, matrix = torch.randn(96).bfloat16(), Float8Matrix.of(weight)
    values, scale = quantise_rows(x)
    rounded = values.double() * scale
    assert ((rounded - x).abs() <= 2**-4 * x.abs() + scale * 2**-10).all()
    alone = quantise_rows(x[4:5])
    assert torch.equal(alone[0].float(), values[4:5].float())
    assert torch.equal(alone[1], scale[4:5])
    expected = rounded @ (matrix.values.double() * matrix.scale.T).T + bias
    found = matrix.multiply(x, bias)
    assert found.dtype == torch.bfloat16
    largest = expected.abs().amax(1, keepdim=True)
    assert ((found - expected).abs() <= 2**-8 * largest).all()


def test_rows_of_zeros_and_of_tiny_values_stay_finite() -> None:
    x = torch.zeros(3, 32)
    x[1] = 1e-38
    values, scale = quantise_rows(x)
    assert (values.float() == 0).all()
    assert scale.isfinite().all()
    assert (scale > 0).all()


@pytest.mark.parametrize("name", ["qwen3", "llama-bias"])
def test_a_decoder_is_close_to_bfloat16(models: dict[str, Path], name: str) -> None:
    source = open_model(models[name])
    with torch.inference_mode():
        config = source.config("fp8")
        decoder = Decoder(config, source.weights(config), "cpu")
    assert config.dtype == config.kv_dtype == torch.bfloat16
    exact = Decoder.load(models[name], torch.bfloat16)
    tokens, tree = random_tokens(90), random_tokens(len(PARENTS), seed=1)
    results = []
    for each in (decoder, exact):
        cache = LocalCache(each.config)
        logits = extend(each, cache, tokens)
        results.append(torch.cat([logits, ask_tree(each, cache, tree, PARENTS)]).float())
    found, expected = results
    error = ((found - expected).norm() / expected.norm()).item()
    assert 0.005 < error < 0.2  # each product has one of 0.04


def test_where_it_cannot_run_an_error_says_what_to_use(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match="use int8 on a CPU"):
        Decoder.load(models["llama"], "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(UnsupportedModelError, match=r"cuda:0 has 8\.6: use bfloat16"):
        Decoder.load(models["llama"], "fp8", "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(UnsupportedModelError, match="routed experts have no products in fp8"):
        Decoder.load(models["qwen3-moe"], "fp8", "cuda:0")
    source = open_model(save_model(tmp_path, "llama", intermediate_size=168))
    config = source.config("fp8")
    with pytest.raises(UnsupportedModelError, match=r"'layers.0.down'.* 168 inputs"):
        Decoder(config, source.weights(config), "cpu")
