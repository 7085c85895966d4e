"""The sampling kernels choose the tokens that the CPU chooses."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.bench.gpu.sampling import KINDS
from paceline.kernels import History, SamplingParams, choose_token, choose_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("vocab", "rows"), [(4096, 100), (151_936, 12)])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_cpu(
    device: torch.device, kind: str, vocab: int, rows: int
) -> None:
    rng = random.Random(0)
    logits = 4 * torch.randn(rows, vocab)
    logits = logits.bfloat16() if vocab > 5000 else logits  # with many ties
    params = [SamplingParams(**KINDS[kind], seed=rng.getrandbits(64)) for _ in range(rows)]  # type: ignore[arg-type]
    positions = [rng.getrandbits(30) for _ in range(rows)]
    empty = History([])
    assert choose_tokens(logits.to(device), params, positions).tolist() == [
        choose_token(row, each, at, empty)
        for row, each, at in zip(logits, params, positions, strict=True)
    ]
