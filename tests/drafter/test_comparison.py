"""The statistics of trials: quantiles, bounds that hold, verdicts that are seldom wrong."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.registry.comparison import (
    Mean,
    difference_bounds,
    mean_per_round,
    student_quantile,
)
from paceline.drafter.registry.trial import Sample, Trial, TrialSettings, TrialState

ROUNDS = st.lists(st.integers(1, 50), min_size=2, max_size=20)
ERRORS = st.floats(1e-6, 0.5)


@pytest.mark.parametrize(
    ("error", "freedom", "quantile"),
    [
        (0.05, 1, 6.3138),
        (0.05, 2, 2.9200),
        (0.025, 3, 3.1824),
        (0.025, 7, 2.3646),
        (0.005, 8, 3.3554),
        (0.0005, 10, 4.5869),
        (0.01, 30, 2.4573),
        (0.01, 120, 2.3578),
        (0.025, 10**6, 1.9600),
        (0.5, 5, 0.0),
    ],
)
def test_quantiles_are_those_of_the_tables(error: float, freedom: int, quantile: float) -> None:
    assert student_quantile(error, freedom) == pytest.approx(quantile, abs=1e-4)


@given(error=ERRORS, freedom=st.integers(1, 2000))
def test_quantiles_fall_with_error_and_freedom(error: float, freedom: int) -> None:
    quantile = student_quantile(error, freedom)
    assert quantile >= student_quantile(error, freedom + 1) - 1e-4
    assert quantile >= student_quantile(min(0.5, error * 2), freedom)


@given(values=st.lists(st.floats(0, 100), min_size=2, max_size=30))
def test_with_one_round_each_it_is_the_plain_mean(values: list[float]) -> None:
    found = mean_per_round(values, [1] * len(values))
    assert found.value == pytest.approx(mean(values))
    assert found.variance == pytest.approx(variance(values) / len(values), abs=1e-9)
    assert found.freedom == len(values) - 1


@given(rounds=ROUNDS, rate=st.floats(0, 10))
def test_generations_that_agree_have_no_variance(rounds: list[int], rate: float) -> None:
    found = mean_per_round([rate * n for n in rounds], rounds)
    assert found.value == pytest.approx(rate)
    assert found.variance == pytest.approx(0, abs=1e-9)


@given(
    value=st.floats(0, 10),
    other=st.floats(0, 10),
    spread=st.floats(0, 5),
    factor=st.floats(0.1, 2),
    error=ERRORS,
)
def test_bounds_enclose_the_difference_and_tighten(
    value: float, other: float, spread: float, factor: float, error: float
) -> None:
    candidate, baseline = Mean(value, spread, 9), Mean(other, spread / 2, 12)
    low, high = difference_bounds(candidate, baseline, factor, error)
    assert low <= value - factor * other <= high
    looser = difference_bounds(candidate, baseline, factor, error / 2)
    assert looser[0] <= low
    assert looser[1] >= high


def generation(draws: random.Random, length: float, draft_seconds: float) -> Sample:
    """Rounds of a text with these means: some are easy, some hard, some long."""
    rounds = draws.randint(5, 60)
    mood = length * draws.uniform(0.5, 1.5)
    accepted = sum(draws.expovariate(1 / mood) for _ in range(rounds))
    seconds = sum(draws.expovariate(1 / draft_seconds) for _ in range(rounds))
    return Sample(rounds, round(accepted), seconds)


SETTINGS = TrialSettings(confidence=0.9, length_margin=0.2, time_margin=0.5, max_generations=64)
LENGTH, SECONDS = 2.0, 0.005


def outcomes(length: float, draft_seconds: float) -> Counter[str]:
    """Verdicts of 200 trials of such a version beside one with LENGTH and SECONDS, one to three."""
    draws = random.Random(7)
    found: Counter[str] = Counter()
    for _ in range(200):
        trial = Trial("new", "old", SETTINGS)
        while trial.running:
            for _ in range(3):
                trial.add("old", generation(draws, LENGTH, SECONDS))
            trial.add("new", generation(draws, length, draft_seconds))
        promoted = trial.state is TrialState.PROMOTED
        found["promoted" if promoted else trial.reason.partition(":")[0]] += 1
    return found


@pytest.mark.parametrize(
    ("length", "draft_seconds", "reason"),
    [
        (LENGTH * 0.8, SECONDS, "accepts too little"),
        (LENGTH, SECONDS * 1.5 + 1e-4, "takes too long"),
    ],
)
def test_at_the_margin_either_verdict_is_seldom(
    length: float, draft_seconds: float, reason: str
) -> None:
    """The worst case of both errors: a hair to one side or the other makes each of them one."""
    found = outcomes(length, draft_seconds)
    # A tenth of 200 may be wrong for the confidence of 0.9.
    assert found["promoted"] <= 20
    assert found[reason] <= 20


def test_clear_cases_are_decided() -> None:
    assert outcomes(LENGTH, SECONDS)["promoted"] >= 150
    assert outcomes(LENGTH * 2, SECONDS / 2)["promoted"] >= 199
    assert outcomes(LENGTH / 4, SECONDS)["accepts too little"] >= 199
    assert outcomes(LENGTH, SECONDS * 4)["takes too long"] >= 199


def test_a_version_that_draws_nothing_is_as_good_as_another_such() -> None:
    trial = Trial("new", "old", TrialSettings())
    for _ in range(8):
        for version in ("old", "new"):
            trial.add(version, Sample(10, 0, 0.0))
    assert trial.state is TrialState.PROMOTED


def test_others_and_empty_generations_do_not_count() -> None:
    trial = Trial("new", "old", TrialSettings(max_generations=8))
    for _ in range(100):
        trial.add("third", Sample(10, 5, 0.1))
        trial.add("new", Sample())
    assert trial.running
    for _ in range(8):
        trial.add("new", Sample(10, 5, 0.1))
    assert trial.state is TrialState.ROLLED_BACK
    assert "no verdict" in trial.reason
