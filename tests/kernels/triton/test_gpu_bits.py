"""The comparison of rows that `make gpu-first` makes on a GPU, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.bench.gpu import bits
from paceline.bench.gpu.cases import SMALL, RandomWeights
from paceline.decoder import Decoder


@pytest.mark.slow
@pytest.mark.usefixtures("triton_on_cpu", "products_of_a_gpu")
def test_rows_have_the_bits_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": 6, "LEVELS": 5, "OTHERS": 4}.items():
        monkeypatch.setattr(bits, name, value)
    config = replace(
        SMALL, layers=1, hidden=64, intermediate=96, q_heads=4, kv_heads=2, head_dim=32,
        vocab_size=50, windows=(None,), rope_inv_freq=tuple(0.3**i for i in range(16)),
    )  # fmt: skip
    decoder = Decoder(config, RandomWeights(config, torch.device("cpu"), 0), "cpu")
    with torch.inference_mode():
        found = bits.compare(decoder, 300)
    assert len(found) == 9
    assert not any(found.values()), found
