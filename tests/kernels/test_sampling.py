"""Filters against a plain full-sort reading of their definition, and the choice of a token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels import (
    History,
    SamplingParams,
    choose_token,
    filter_logits,
    gumbel_noise,
    raw_logprobs,
)

EMPTY = History([])


def plain_filter(logits: Tensor, params: SamplingParams, history: History) -> list[float]:
    """The documented order, one token at a time, in Python floats of float32 steps."""
    x = logits.float().tolist()
    for token in history.prompt | set(history.output):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(history.output):
        count = history.output.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        x[token] += bias
    if params.temperature == 0:
        return x
    x = [value / params.temperature for value in x]
    kept = set(range(len(x)))
    if params.min_p:
        best = max(x)
        kept = {v for v in kept if x[v] >= best + math.log(params.min_p)}
    order = sorted(kept, key=lambda v: (-x[v], v))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        best = x[order[0]]
        weights = [math.exp(x[v] - best) for v in order]
        reached, count = 0.0, 0
        while count < len(order) and reached < params.top_p * sum(weights):
            reached += weights[count]
            count += 1
        order = order[:count]
    return [value if v in set(order) else -math.inf for v, value in enumerate(x)]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 64, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    penalties=st.sampled_from([(1.0, 0.0, 0.0), (1.3, 0.5, 0.25), (0.8, -0.5, 0.0)]),
    bias=st.sampled_from([(), ((3, 2.5), (5, -math.inf))]),
)
def test_filters_do_what_their_definition_says(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
    bias: tuple[tuple[int, float], ...],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(64, generator=generator)
    history = History([1, 2, 2, 60], [2, 7, 7, 7])
    params = SamplingParams(temperature, top_k, top_p, min_p, *penalties, bias)
    found = filter_logits(logits, params, history)
    expected = torch.tensor(plain_filter(logits, params, history))
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "kept"),
    [({"top_k": 2}, [1, 2]), ({"top_k": 3}, [1, 2, 3]), ({"top_p": 0.3}, [1, 2])],
)
def test_ties_go_to_the_lower_id(change: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([0.0, 5.0, 5.0, 5.0, 5.0])
    found = filter_logits(logits, SamplingParams(**change), EMPTY)  # type: ignore[arg-type]
    assert found.isfinite().nonzero()[:, 0].tolist() == kept


def test_ties_go_to_the_lower_id_across_a_large_vocabulary() -> None:
    logits = torch.zeros(5000)
    kept = filter_logits(logits, SamplingParams(top_k=700), EMPTY).isfinite()
    assert kept[:700].all()
    assert not kept[700:].any()
    kept = filter_logits(logits, SamplingParams(top_p=0.5), EMPTY).isfinite()
    assert kept.sum().item() == pytest.approx(2500, abs=1)
    assert kept[: int(kept.sum())].all()
    assert choose_token(logits, SamplingParams(temperature=0), 0, EMPTY) == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10**6),
    top_k=st.sampled_from([0, 1, 5, 400]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
)
def test_the_choice_is_the_best_filtered_noisy_logit(
    seed: int, position: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(position))
    params = SamplingParams(temperature, top_k, top_p, min_p, seed=seed)
    expected = filter_logits(logits, params, EMPTY)
    if temperature:
        expected = expected + gumbel_noise(seed, position, 300)
    assert choose_token(logits, params, position, EMPTY) == int(expected.argmax())


def test_choices_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    counts = torch.zeros(5)
    for seed in range(8000):
        counts[choose_token(logits, SamplingParams(seed=seed), 3, EMPTY)] += 1
    expected = 8000 * logits.softmax(0)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 23  # 4 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=3)])
def test_inputs_are_left_as_they_were(params: SamplingParams) -> None:
    logits = torch.randn(50)
    before = logits.clone()
    choose_token(logits, params, 0, EMPTY)
    filter_logits(logits, params, EMPTY)
    assert torch.equal(logits, before)


def test_greedy_sees_penalties_and_bias() -> None:
    logits = torch.tensor([1.0, 2.0, 1.5])
    assert choose_token(logits, SamplingParams(temperature=0), 0, EMPTY) == 1
    biased = SamplingParams(temperature=0, logit_bias=((1, -1.0),))
    assert choose_token(logits, biased, 0, EMPTY) == 2
    penalised = SamplingParams(temperature=0, frequency_penalty=0.3)
    assert choose_token(logits, penalised, 0, History([], [1, 1])) == 2


def test_bfloat16_logits_are_read_as_float32() -> None:
    logits = torch.randn(200).bfloat16()
    params = SamplingParams(top_p=0.9, seed=4)
    assert choose_token(logits, params, 1, EMPTY) == choose_token(logits.float(), params, 1, EMPTY)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    params = SamplingParams(logit_bias=((10, 1.0),))
    with pytest.raises(ValueError, match="outside the vocabulary of 5"):
        choose_token(torch.zeros(5), params, 0, EMPTY)


def test_raw_logprobs() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0])
    logprob, best = raw_logprobs(logits, 0, 2)
    expected = logits.log_softmax(0)
    assert logprob == pytest.approx(expected[0].item())
    assert [token for token, _ in best] == [1, 2]
    assert best[0][1] == pytest.approx(expected[1].item())
    assert raw_logprobs(logits, 0, 0)[1] == []
    assert len(raw_logprobs(logits, 0, 99)[1]) == 4
