"""Ranking candidates by what the verifier will choose."""

from __future__ import annotations

import pytest
import torch

from paceline.drafter.methods.ranking import Ranker
from paceline.kernels import SamplingParams, gumbel_noise


@pytest.mark.parametrize("vocab", [90, 5000, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_come_first_whatever_the_vocabulary(vocab: int, temperature: float) -> None:
    """Few tokens are likely, so those left out of a large vocabulary change nothing."""
    draws = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=draws)
    for row in logits:
        row[torch.randperm(vocab, generator=draws)[:40]] += 40.0
    params = SamplingParams(temperature=temperature, seed=2**64 - 9)
    ranker = Ranker(params, prompt=[1], output=[], vocab_size=vocab, candidates=64)
    ids, logs, _ = ranker.rank(logits, 1000, [[]] * 3, 5)
    scores = logits
    if temperature:
        scores = logits / temperature + gumbel_noise(params.seed, 1000, vocab)
    expected = scores.log_softmax(-1).topk(5)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logs, expected.values, rtol=1e-4, atol=1e-4)
