"""The comparison of rows that `make gpu-first` makes on a GPU, in Triton's interpreter."""

import json
from dataclasses import replace

import pytest
import torch

from paceline.bench.gpu import decoder
from paceline.bench.gpu.cases import SMALL


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.usefixtures("triton_on_cpu", "products_of_a_gpu")
def test_rows_have_the_bits_of_plain_decoding(
    weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROWS": 6, "LEVELS": 5, "OTHERS": 4}.items():
        monkeypatch.setattr(decoder, name, value)
    config = replace(
        SMALL, layers=1, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=32,
        vocab_size=50, windows=(None,), rope_inv_freq=tuple(0.3**i for i in range(16)),
    )  # fmt: skip
    config = replace(config, weights=weights)
    assert decoder.check(config, (300,), torch.device("cpu")) == 0
    *_, found = map(json.loads, capsys.readouterr().out.splitlines())
    cases = found[f"{weights}, rows that differ behind 300 tokens"]
    assert len(cases) == 9
    assert not any(cases.values()), cases
