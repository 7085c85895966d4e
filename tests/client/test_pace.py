"""The rule of pace, on a simulated service that costs what it is told to."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from paceline.client._pace import Pace, SharedSpeeds

Accepted = Callable[[int], int | None]
"""Drafted tokens that stand at a position of the text; None: the drafter has no tree there."""


@dataclass
class Costs:
    """Seconds of each part, a plain step being the unit."""

    verify: float = 1.3
    draft: float = 0.1
    ask: float = 0.05
    start: float = 0.08
    noise: float = 0.05


def simulate(
    accepted: Accepted,
    costs: Costs,
    tokens: int = 512,
    shared: SharedSpeeds | None = None,
    seed: int = 0,
) -> tuple[float, int]:
    """Seconds a generation takes, and its drafted rounds. Plain decoding takes `tokens` seconds."""
    chance = random.Random(seed)
    pace = Pace(shared or SharedSpeeds())
    clock, position, drafted = 0.0, 0, 0

    def spend(seconds: float) -> float:
        nonlocal clock
        spent = seconds * chance.uniform(1 - costs.noise, 1 + costs.noise)
        clock += spent
        return spent

    while position < tokens:
        steps = pace.steps()
        asked = 0.0
        if steps == 0:
            good = accepted(position)
            asked = spend(costs.ask if good is None else costs.ask + costs.draft)
            if good is not None:
                drafted += 1
                position += good + 1
                pace.drafted(good + 1, asked + spend(costs.verify + costs.start))
                continue
            pace.missed(asked)
            steps = pace.steps()
        assert steps > 0
        steps = min(steps, tokens - position)
        spend(costs.start)
        pace.free_ran(steps, spend(steps))
        position += steps
    return clock, drafted


def never(position: int) -> int:
    return 0


def nothing(position: int) -> None:
    return None


def always(position: int) -> int:
    return 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("verify", [1.05, 1.3, 2.0])
@pytest.mark.parametrize("accepted", [never, nothing])
def test_a_useless_drafter_costs_at_most_a_twentieth(
    accepted: Accepted, verify: float, seed: int
) -> None:
    seconds, _ = simulate(accepted, Costs(verify=verify), seed=seed)
    assert 512 / seconds >= 0.95


def test_an_empty_tree_now_and_a_useless_one_then_cost_no_more() -> None:
    chance = random.Random(1)
    seconds, _ = simulate(lambda _: 0 if chance.random() < 0.2 else None, Costs())
    assert 512 / seconds >= 0.95


def test_a_good_drafter_is_used_nearly_always() -> None:
    seconds, drafted = simulate(always, Costs())
    assert 512 / seconds >= 3.0
    assert drafted >= 512 / 5 * 0.9


@pytest.mark.parametrize("seed", range(5))
def test_copied_text_with_gaps_is_at_least_twice_as_fast(seed: int) -> None:
    """Stretches of 60 tokens that are copied, of 10 that are not."""

    def accepted(position: int) -> int | None:
        return min(8, 60 - position % 70) if position % 70 < 60 else None

    seconds, _ = simulate(accepted, Costs(), seed=seed)
    assert 512 / seconds >= 2.0


@pytest.mark.parametrize("seed", range(5))
def test_a_middling_drafter_never_loses_much(seed: int) -> None:
    """One that pays off about as much as it costs."""
    chance = random.Random(seed)
    seconds, _ = simulate(lambda _: int(chance.random() < 0.45), Costs(), seed=seed)
    assert 512 / seconds >= 0.92


@pytest.mark.parametrize("seed", range(5))
def test_a_change_for_the_better_is_noticed(seed: int) -> None:
    seconds, _ = simulate(lambda p: 6 if p > 300 else 0, Costs(), tokens=1000, seed=seed)
    assert 1000 / seconds >= 1.5


@pytest.mark.parametrize("seed", range(5))
def test_a_change_for_the_worse_is_noticed(seed: int) -> None:
    best = 200 / 7 * 1.53 + 800
    seconds, _ = simulate(lambda p: 6 if p < 200 else 0, Costs(), tokens=1000, seed=seed)
    assert seconds <= best * 1.06


def test_verification_that_costs_as_much_as_it_brings_is_left_alone() -> None:
    """On a machine where a tree of tokens costs a step for each of them."""
    seconds, _ = simulate(always, Costs(verify=6.0))
    assert 512 / seconds >= 0.95


def test_the_next_generation_starts_where_the_last_one_ended() -> None:
    shared = SharedSpeeds()
    simulate(always, Costs(), shared=shared)
    pace = Pace(shared)
    assert pace.steps() == 0
    assert simulate(always, Costs(), tokens=50, shared=shared)[0] < 50 / 2.5
    assert shared.plain.per_second == pytest.approx(1.0, rel=0.2)


def test_an_unknown_service_is_measured_first() -> None:
    assert Pace(SharedSpeeds()).steps() == 4


def test_runs_double_while_trees_fail() -> None:
    pace = Pace(SharedSpeeds())
    runs = []
    for _ in range(7):
        pace.free_ran(pace.steps(), float(pace.steps()))
        assert pace.steps() == 0
        pace.drafted(1, 3.0)
        runs.append(pace.steps())
    assert runs == [4, 8, 16, 32, 64, 64, 64]


def test_success_starts_the_runs_afresh() -> None:
    pace = Pace(SharedSpeeds())
    pace.free_ran(4, 4.0)
    for _ in range(3):
        pace.drafted(1, 3.0)
        pace.free_ran(pace.steps(), float(pace.steps()))
    pace.drafted(5, 2.0)
    assert pace.steps() == 0
    pace.drafted(1, 9.0)
    while not pace.steps():
        pace.drafted(1, 9.0)
    pace.free_ran(pace.steps(), float(pace.steps()))
    pace.drafted(50, 2.0)
    pace.missed(0.5)
    assert pace.steps() == 4


def test_cheap_misses_are_followed_by_short_runs() -> None:
    pace = Pace(SharedSpeeds())
    for _ in range(10):
        pace.free_ran(4, 4.0)
        pace.missed(0.05)
        assert pace.steps() <= 5


def test_a_drafter_of_varying_luck_is_trusted_by_its_mean() -> None:
    """A fifth of its rounds bring nothing; the mean is well worth what a round costs."""
    costs = Costs(verify=1.5, draft=0.15)
    shares = [0.22, 0.22, 0.22, 0.18, 0.16]  # of rounds in which 0 to 4 drafted tokens stand
    emitted = 1 + sum(count * share for count, share in enumerate(shares))
    always_drafting = 256 * (costs.verify + costs.draft + costs.ask + costs.start) / emitted
    total = 0.0
    for seed in range(30):
        luck = random.Random(seed)
        total += simulate(
            lambda _, luck=luck: luck.choices(range(5), shares)[0], costs, tokens=256, seed=seed
        )[0]
    assert total / 30 <= always_drafting * 1.06


def test_where_it_is_not_to_adapt_every_round_drafts() -> None:
    """But for a short run where no tree came."""
    pace = Pace(SharedSpeeds(), adaptive=False)
    for _ in range(300):
        assert pace.steps() == 0
        pace.drafted(1, 100.0)
    pace.missed(0.1)
    assert pace.steps() == 4
    pace.free_ran(4, 0.001)
    assert pace.steps() == 0
