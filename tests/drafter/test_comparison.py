"""The statistics of canarys: quantiles, bounds that hold, verdicts that are seldom wrong."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafter.registry.canary import Canary, CanarySettings
from paceline.drafter.registry.comparison import (
    Mean,
    difference_bounds,
    mean_per_round,
    student_quantile,
)
from paceline.drafter.statistics import DraftStatistics
from paceline.v1 import drafter_pb2

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


def generation(draws: random.Random, length: float, draft_seconds: float) -> DraftStatistics:
    """Rounds of a text with these means: some are easy, some hard, some long."""
    rounds = draws.randint(5, 60)
    mood = length * draws.uniform(0.5, 1.5)
    accepted = sum(draws.expovariate(1 / mood) for _ in range(rounds))
    seconds = sum(draws.expovariate(1 / draft_seconds) for _ in range(rounds))
    return DraftStatistics(rounds, round(accepted), seconds)


SETTINGS = CanarySettings(confidence=0.9, length_margin=0.2, time_margin=0.5, max_generations=64)
LENGTH, SECONDS = 2.0, 0.005


def outcomes(length: float, draft_seconds: float) -> Counter[str]:
    """Outcomes of 200 canaries with these means; the baseline has LENGTH and SECONDS."""
    draws = random.Random(7)
    found: Counter[str] = Counter()
    for _ in range(200):
        canary = Canary("new", "old", SETTINGS)
        while canary.running:
            for _ in range(3):
                canary.add("old", generation(draws, LENGTH, SECONDS))
            canary.add("new", generation(draws, length, draft_seconds))
        promoted = canary.state == drafter_pb2.CANARY_STATE_PROMOTED
        found["promoted" if promoted else canary.reason.partition(":")[0]] += 1
    return found


@pytest.mark.parametrize(
    ("length", "draft_seconds", "reason"),
    [
        (LENGTH * 0.8, SECONDS, "accepted length too low"),
        (LENGTH, SECONDS * 1.5 + 1e-4, "draft time too high"),
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
    assert outcomes(LENGTH / 4, SECONDS)["accepted length too low"] >= 199
    assert outcomes(LENGTH, SECONDS * 4)["draft time too high"] >= 199


def test_a_version_that_draws_nothing_is_as_good_as_another_such() -> None:
    canary = Canary("new", "old", CanarySettings())
    for _ in range(8):
        for version in ("old", "new"):
            canary.add(version, DraftStatistics(10, 0, 0.0))
    assert canary.state == drafter_pb2.CANARY_STATE_PROMOTED


def test_others_and_empty_generations_do_not_count() -> None:
    canary = Canary("new", "old", CanarySettings(max_generations=8))
    for _ in range(100):
        canary.add("third", DraftStatistics(10, 5, 0.1))
        canary.add("new", DraftStatistics())
    assert canary.running
    for _ in range(8):
        canary.add("new", DraftStatistics(10, 5, 0.1))
    assert canary.state == drafter_pb2.CANARY_STATE_ROLLED_BACK
    assert "undecided" in canary.reason
