"""Candidates are ranked by what the verifier will choose, and trees grow best first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.growth.ranking import Ranker
from paceline.kernels import SamplingRules, gumbel_noise_at
from paceline.tree import grow

# A rule of growth: depth to a list of children, the same for every node of that depth.
rules = st.lists(st.lists(st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=4)


@given(rules, st.integers(0, 20), st.integers(0, 5), st.sampled_from([0.0, 0.1, 0.5]))
def test_grow_takes_the_likeliest_paths(
    rule: list[list[float]], nodes: int, depth: int, floor: float
) -> None:
    def expand(state: None, level: int) -> list[tuple[int, float, None]]:
        children = rule[level] if level < len(rule) else []
        return [(token, confidence, None) for token, confidence in enumerate(children)]

    tree = grow(None, expand, nodes=nodes, depth=depth, min_survival=floor)
    tree.check()
    survivals = list(tree.survivals)
    assert survivals == sorted(survivals, reverse=True)
    everything = sorted(survivals_of(rule[:depth], 1.0, floor), reverse=True)
    assert survivals == pytest.approx(everything[:nodes])
    assert len({tree.path(node) for node in range(len(tree))}) == len(tree)


def survivals_of(rule: Sequence[Sequence[float]], reach: float, floor: float) -> list[float]:
    """Survival of every node there could be."""
    if not rule:
        return []
    below: list[float] = []
    for confidence in rule[0]:
        if reach * confidence >= floor:
            below.append(reach * confidence)
            below += survivals_of(rule[1:], reach * confidence, floor)
    return below


@pytest.mark.parametrize("vocab", [90, 5000, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_come_first_whatever_the_vocabulary(vocab: int, temperature: float) -> None:
    """Few tokens are likely, so those left out of a large vocabulary change nothing."""
    draws = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=draws)
    for row in logits:
        row[torch.randperm(vocab, generator=draws)[:40]] += 40.0
    params = SamplingRules(temperature=temperature, seed=2**64 - 9)
    ranker = Ranker(params, prompt=[1], output=[], vocab_size=vocab, candidates=64)
    ids, logs = ranker.rank(logits, 1000, 5)
    scores = logits
    if temperature:
        scores = logits / temperature + gumbel_noise_at(params.seed, 1000, torch.arange(vocab))
    expected = scores.log_softmax(-1).topk(5)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logs, expected.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingRules(temperature=0.0),
        SamplingRules(temperature=0.7, seed=5),
        SamplingRules(temperature=0.7, seed=5, top_p=0.9),
        SamplingRules(temperature=0.7, seed=5, repetition_penalty=1.3),
    ],
)
def test_a_reduced_vocabulary_ranks_as_the_whole_one_without_the_other_tokens(
    params: SamplingRules,
) -> None:
    draws = torch.Generator().manual_seed(1)
    drafted = torch.randperm(300, generator=draws)[:50].sort().values
    logits = torch.randn(1, 50, generator=draws) * 4
    whole = torch.full((1, 300), -torch.inf)
    whole[:, drafted] = logits
    reduced, all_ids = (
        Ranker(params, prompt=[1], output=[], vocab_size=290, candidates=64, drafted=tokens)
        for tokens in (drafted, None)
    )
    found, expected = reduced.rank(logits, 7, 5), all_ids.rank(whole, 7, 5)
    torch.testing.assert_close(found[1], expected[1])
    kept = found[1] > -torch.inf  # the ids of others are arbitrary
    assert torch.equal(found[0][kept], expected[0][kept])
    token, log, proposal = reduced.draw(logits[0], 7)
    expected_token, expected_log, expected_proposal = all_ids.draw(whole[0], 7)
    assert (token, log) == (expected_token, expected_log)
    assert proposal.tokens.tolist() == expected_proposal.tokens.tolist()
