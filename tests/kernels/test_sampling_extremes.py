"""Sampling with extreme parameters and logits: it ends, with the token of the definition."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels import (
    History,
    Proposal,
    SamplingRules,
    accept_or_resample,
    best_candidates,
    choose_token,
    choose_tokens,
    filter_logits,
    gumbel_noise_at,
    perturbed_logits,
    raw_logprobs,
    sampling,
)

TINY = (5e-324, 1e-320, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-12)
HUGE = (1e6, 1e12, 1e20, 1e30, 3.4e38, 1e39, 1e300, 1.7976931348623157e308)
POSITIVE = (*TINY, 0.3, 0.9, 1.0, 1.1, 2.0, *HUGE)
SIGNED = (0.0, *POSITIVE, *(-x for x in POSITIVE))
SHARES = (*TINY, 0.02, 0.5, 0.999, 1 - 2.0**-53, 1.0)
STRANGE = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 0.0, -0.0, 1.0, 12.0)
HISTORY = ([1, 2, 2], [2, 7, 7, 7])
VOCAB = 700  # more than the first guess of top_p

extreme_params = st.builds(
    SamplingRules,
    temperature=st.sampled_from((0.0, *POSITIVE)),
    top_k=st.sampled_from((0, 1, 3, VOCAB, 2**32 - 1)),
    top_p=st.sampled_from((1.0,) * 10 + SHARES),
    min_p=st.sampled_from((0.0, *SHARES)),
    repetition_penalty=st.sampled_from(POSITIVE),
    presence_penalty=st.sampled_from(SIGNED),
    frequency_penalty=st.sampled_from(SIGNED),
    logit_bias=st.lists(
        st.tuples(st.integers(0, VOCAB - 1), st.sampled_from((*SIGNED, -math.inf))),
        max_size=3,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
    seed=st.sampled_from((0, 1, 2**64 - 1)),
    rejection=st.booleans(),
)
strange_rows = st.integers(0, 100).flatmap(
    lambda seed: st.builds(
        lambda places, fill: _strange(seed, places, fill),
        st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from(STRANGE), max_size=6),
        st.sampled_from((None, None, math.nan, math.inf, -math.inf, 0.0, 3.4e38)),
    )
)


def _strange(seed: int, places: dict[int, float], fill: float | None) -> Tensor:
    row = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    if fill is not None:
        row[:] = fill
    for token, value in places.items():
        row[token] = value
    return row


@pytest.fixture(autouse=True, params=["compiled", "NumPy"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the choice in C and without it, as for logits that are not finite; a search of more
    steps than the vocabulary has sizes fails."""
    if request.param == "NumPy":
        monkeypatch.setattr(sampling, "_choose", lambda *_: None)
    rank, nucleus = sampling._ranked, sampling._nucleus

    def counted(values: Tensor, mass: float) -> Tensor:
        sizes: list[int] = []

        def limited(values: Tensor, count: int) -> Tensor:
            sizes.append(count)
            assert len(sizes) <= 8, "the search for the nucleus does not end"
            return rank(values, count)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_ranked", limited)
            return nucleus(values, mass)

    monkeypatch.setattr(sampling, "_nucleus", counted)


def reference(row: Tensor, params: SamplingRules, position: int) -> tuple[NDArray[Any], ...]:
    """Scores in float64 and how wrong float32 may be; which tokens are surely kept, and which may
    be kept by min_p and top_k."""
    prompt, output = HISTORY
    x = row.double().numpy().copy()
    largest = np.abs(x)
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
        largest[token] = max(largest[token], abs(x[token]))
    for token in set(output):
        penalty = params.frequency_penalty * output.count(token) + params.presence_penalty
        x[token] -= penalty
        parts = abs(params.frequency_penalty) * output.count(token) + abs(params.presence_penalty)
        largest[token] = max(largest[token], abs(x[token]), parts)
    for token, bias in params.logit_bias:
        x[token] += bias
        if math.isfinite(bias):
            largest[token] = max(largest[token], abs(x[token]), abs(bias))
    error = largest * 2.0**-20
    if params.temperature == 0:
        return x, error, np.ones(len(x), bool), np.ones(len(x), bool)
    x, error = x / params.temperature, error / params.temperature + 1e-30
    low, high = x - error, x + error
    sure, maybe = np.ones(len(x), bool), np.ones(len(x), bool)
    if params.min_p:
        below = math.log(params.min_p)
        slack = abs(below) * 2.0**-20
        sure, maybe = low >= high.max() + below + slack, high >= low.max() + below - slack
    if params.top_k:
        better = np.searchsorted(np.sort(-high[maybe]), -low, "right") - maybe  # others
        surely = np.searchsorted(np.sort(-low[sure]), -high, "left")
        sure, maybe = sure & (better < params.top_k), maybe & (surely < params.top_k)
    noise = gumbel_noise_at(params.seed, position, torch.arange(len(x))).double().numpy()
    return x + noise, error + np.abs(x + noise) * 2.0**-20, sure, maybe


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=extreme_params, seed=st.integers(0, 1000))
def test_any_parameters_choose_the_token_of_the_definition(
    params: SamplingRules, seed: int
) -> None:
    """Within the rounding of float32. The nucleus is left out: it holds the chosen token."""
    row = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    history = History(*HISTORY)
    token = choose_token(row, params, seed, history)
    scores = filter_logits(row, params, history)
    assert not scores.isnan().any()
    assert scores.max().isfinite()
    assert scores[token].isfinite()
    if params.top_p == 1.0:
        expected, error, sure, maybe = reference(row, params, seed)
        assert maybe[token]
        assert expected[token] + error[token] >= (expected - error)[sure].max(initial=-math.inf)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=extreme_params, row=strange_rows)
def test_strange_logits_end_in_a_token_too(params: SamplingRules, row: Tensor) -> None:
    history = History(*HISTORY)
    token = choose_token(row, params, 3, history)
    assert 0 <= token < VOCAB
    assert not filter_logits(row, params, history).isnan().any() or params.greedy
    scores = perturbed_logits(row[None], [params], [3])
    assert scores.shape == (1, VOCAB)
    drafted = {0: (5, Proposal.certain(5))} if params.rejection and not params.greedy else {}
    assert 0 <= int(choose_tokens(row[None], [params], [3], drafted)[0]) < VOCAB
    if drafted:
        assert 0 <= accept_or_resample(row, params, 3, history, *drafted[0]) < VOCAB
    raw_logprobs(row, token, 5)
    best_candidates(row[None].clone(), 4, max(params.temperature, 1.0), torch.zeros(VOCAB))


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}])
@pytest.mark.parametrize("temperature", TINY[:-1])
def test_the_lowest_temperatures_are_greedy(temperature: float, more: dict[str, float]) -> None:
    row = torch.tensor([3.0, 12.0, 9.0, 12.0, 4.0])
    params = SamplingRules(temperature=temperature, seed=1, **more)  # type: ignore[arg-type]
    assert choose_token(row, params, 5, History([1])) == 1


@pytest.mark.parametrize(
    ("change", "token"),
    [
        ({"repetition_penalty": 1e-38}, 2), ({"repetition_penalty": 5e-324}, 2),
        ({"logit_bias": ((1, 3e38),), "temperature": 0.5}, 1),
        ({"logit_bias": ((0, 1e308), (1, -1e308))}, 0),
        ({"presence_penalty": -3e38}, 1), ({"frequency_penalty": -1e308}, 1),
        ({"presence_penalty": 3e38, "frequency_penalty": -3e38, "temperature": 1e-9}, 2),
        ({"presence_penalty": 3e38, "logit_bias": ((2, 20.0),)}, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_parameter_that_would_make_a_logit_infinite(
    change: dict[str, float], token: int, top_p: float
) -> None:
    row = torch.tensor([3.0, 9.0, 12.0, 4.0])
    params = SamplingRules(seed=1, top_p=top_p, **change)  # type: ignore[arg-type]
    assert choose_token(row, params, 5, History([1, 2], [1])) == token


def test_a_token_that_is_excluded_stays_so_at_any_temperature() -> None:
    row = torch.zeros(9)
    row[4:] = -math.inf
    for temperature in HUGE:
        params = SamplingRules(temperature=temperature, top_p=0.99, logit_bias=((1, -math.inf),))
        for position in range(40):
            assert choose_token(row, params, position, History([])) in {0, 2, 3}
