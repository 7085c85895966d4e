"""The controller: drafting goes on where it pays and costs next to nothing elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from math import inf
from statistics import mean

import pytest
from simulated_load import MODES, Accepted, Costs, Simulation

from paceline.tree import TokenTree
from paceline.verifier.scheduler.controller import Account, Drafters, SequenceState
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import Scheduler


def stands(chance: float) -> Callable[[int, int, random.Random], int]:
    """A drafter whose tokens stand with such a chance each, whoever it drafts for."""

    def accepted(user: int, got: int, draws: random.Random) -> int:
        count = 0
        while count < 8 and draws.random() < chance:
            count += 1
        return count

    return accepted


def rates(accepted: Accepted, users: int, steps: float = 1000) -> dict[str, float]:
    """Tokens a plain step, by mode."""
    steps += 2000 / users
    return {mode: Simulation(accepted, users, mode).run(steps) for mode in MODES}


@pytest.mark.parametrize("users", [1, 4, 32])
def test_drafting_that_does_not_pay_costs_next_to_nothing(users: int) -> None:
    rate = rates(stands(0.2), users)
    assert rate["scheduled"] > 0.97 * rate["plain"] > 1.2 * rate["fixed"]


@pytest.mark.parametrize("users", [1, 4])
def test_drafting_that_pays_is_let_go_on(users: int) -> None:
    rate = rates(stands(0.85), users)
    assert rate["scheduled"] > 0.95 * rate["fixed"] > 1.2 * rate["plain"]


@pytest.mark.parametrize("users", [1, 4])
def test_sequences_differ_and_each_gets_its_own_way(users: int) -> None:
    """Every fourth one is easy to draft for, and the others are not."""

    def accepted(user: int, got: int, draws: random.Random) -> int:
        return stands(0.05 if user % 4 else 0.95)(user, got, draws)

    rate = rates(accepted, users, 4000)
    assert rate["scheduled"] > max(rate["plain"], rate["fixed"])


def here_and_there(gap: float, length: float) -> Accepted:
    """A drafter that has something to say in some places of each text only, and is right there."""

    @cache
    def places(user: int) -> list[int]:
        """Tokens that are left of the place that each token lies in."""
        draws, left = random.Random(user), [0] * 200
        place = 0
        while place < len(left):
            place += 1 + int(draws.expovariate(1 / gap))
            end = min(len(left), place + 2 + int(draws.expovariate(1 / length)))
            left[place:end] = range(end - place, 0, -1)
            place = end
        return left

    def accepted(user: int, got: int, draws: random.Random) -> int | None:
        return min(8, places(user)[got]) or None

    return accepted


@pytest.mark.parametrize(("gap", "pays"), [(10, True), (100, False)])
def test_places_to_draft_are_found_where_that_pays(gap: float, pays: bool) -> None:
    rate = rates(here_and_there(gap, 10), 1, 4000)
    assert (rate["fixed"] > 1.1 * rate["plain"]) == pays
    assert rate["scheduled"] > 0.97 * max(rate["plain"], rate["fixed"])


@pytest.mark.parametrize("users", [1, 8])
def test_a_slow_drafter_is_dropped_within_a_few_rounds(users: int) -> None:
    """It answers after 50 plain steps, and is right."""
    slow = Simulation(stands(0.8), users, "scheduled", Costs(drafting=50.0), length=2000)
    plain = Simulation(stands(0.8), users, "plain", length=2000)
    assert slow.run(4000) > 0.9 * plain.run(4000)
    assert slow.drafted <= 5 * users


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    """Within a hundred tokens, after thousands of the same text in which it was never right."""

    def accepted(user: int, got: int, draws: random.Random) -> int:
        return stands(0.0 if got < 3000 else 0.9)(user, got, draws)

    assert Simulation(accepted, 1, "scheduled", length=9000).run(3500) * 3500 > 3000 + 400 * 2


def test_a_drafter_that_becomes_good_is_noticed_in_short_texts_too() -> None:
    """Each of them ends before a sequence that lost would try again."""

    def accepted(user: int, got: int, draws: random.Random) -> int:
        return stands(0.0 if user < 40 else 0.9)(user, got, draws)

    slow = Costs(drafting=2.0)
    load = Simulation(accepted, 1, "scheduled", slow, length=100)
    assert load.run(16000) > 1.2


def state(drafter: Account | None = None) -> SequenceState:
    return SequenceState("some", drafter or Account(), 0.0)


def lose(one: SequenceState, tokens: float) -> None:
    """One drafted round that emits a token and takes so many more."""
    one.requested(0.0, 8)
    one.answered(1.0 + tokens, 1, tree=True)


def test_one_stall_does_not_suspend_a_drafter_that_pays_for_long() -> None:
    paying, unknown = state(Account(balance=10.0)), state()
    for one in (paying, unknown):
        lose(one, 100.0)
    assert unknown.own.balance < -20 < -3 < paying.own.balance <= 0


def test_clients_cannot_make_it_remember_any_number_of_names() -> None:
    drafters = Drafters()
    kept = drafters.of("used all the time")
    for number in range(1000):
        drafters.of(str(number))
        assert drafters.of("used all the time") is kept
    assert len(drafters.to_json()) < 100


def test_what_was_learnt_is_taken_over_by_the_next_process() -> None:
    costs = CostTable((1, 512), (1.0, 2.0))
    first, second = Scheduler(costs, 255), Scheduler(costs, 255)
    for _ in range(20):
        first._clock.observe(1, 3.0, 1.0)
        first.costs.observe(1, 1, 1.0, 3.0)
    first._drafters.of("some").balance = 7.0
    second.load_json(json.loads(json.dumps(first.to_json())))
    assert second.to_json() == first.to_json()
    assert second._clock.known(1)
    for damaged in ([], {}, {"plain": {}, "drafters": {"x": 1}, "costs": {}}):
        with pytest.raises(ValueError, match="not the state"):
            Scheduler(costs, 255).load_json(damaged)


@pytest.mark.parametrize("truth", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("drafted", [0.3, 0.6, 0.95])
def test_calibrated_survivals_sum_to_accepted_nodes(drafted: float, truth: float) -> None:
    chance, account = random.Random(1), Account()
    tree = TokenTree.chain([1] * 4, [drafted] * 4)
    summed = []
    for _ in range(300):
        accepted = 0
        while accepted < 4 and chance.random() < truth:
            accepted += 1
        summed.append(sum(survival**account.exponent for survival in tree.survivals))
        account.accepted(summed[-1], accepted)
    expected = sum(truth**depth for depth in range(1, 5))
    assert mean(summed[150:]) == pytest.approx(expected, rel=0.2)


def test_calibration_is_finite_for_any_confidence() -> None:
    account = Account()
    for drafted in (0.0, 1.0):
        survivals = TokenTree.chain([1] * 255, [drafted] * 255).survivals
        for accepted in [0] * 1000 + [255] * 1000:
            account.accepted(sum(each**account.exponent for each in survivals), accepted)
            assert 0 < account.exponent < inf
