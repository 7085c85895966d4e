"""Ranking candidates by what the verifier will choose."""

from __future__ import annotations

import pytest
import torch

from paceline.drafter.methods.beam import Ranker
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


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=5),
        SamplingParams(temperature=0.7, seed=5, top_p=0.9),
        SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, seed=5, rejection=True),
    ],
)
def test_a_reduced_vocabulary_ranks_as_the_whole_one_without_the_other_tokens(
    params: SamplingParams,
) -> None:
    draws = torch.Generator().manual_seed(1)
    drafted = torch.randperm(300, generator=draws)[:50].sort().values
    logits = torch.randn(1, 50, generator=draws) * 4
    whole = torch.full((1, 300), -torch.inf)
    whole[:, drafted] = logits
    found, expected = (
        Ranker(params, prompt=[1], output=[], vocab_size=290, candidates=64, drafted=tokens).rank(
            given, 7, [[3]], 5
        )
        for tokens, given in ((drafted, logits), (None, whole))
    )
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.logs, expected.logs)
