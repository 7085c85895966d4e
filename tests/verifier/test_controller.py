"""The controller: drafting goes on where it pays and costs next to nothing elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from math import inf
from statistics import mean
from typing import Any
from unittest.mock import Mock

import pytest
from simulated_load import MODES, Accepted, Costs, Simulation

from paceline.tree import TokenTree
from paceline.verifier.engine.job import StepOutput
from paceline.verifier.scheduler.controller import Account, Drafters, PlainClock, SequenceState
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


def test_a_drafter_that_never_drafts_costs_next_to_nothing() -> None:
    rate = rates(lambda *_: None, 4)
    assert rate["scheduled"] > 0.97 * rate["plain"]


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


def test_a_tree_pays_for_its_own_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of three plain steps, with a tree of nine nodes that are right and a wrong node."""
    now = 0.0
    monkeypatch.setattr("paceline.verifier.scheduler.scheduler.perf_counter", lambda: now)
    scheduler = Scheduler(CostTable((1, 512), (1.0, 1.0)), 255)
    sequences: list[Any] = [Mock(drafter="some", committed=9) for _ in range(2)]
    for each in sequences:
        each.generation.sampling.rejection = False

    def step(seconds: float, nodes: tuple[int, int], right: tuple[int, int]) -> None:
        nonlocal now
        trees = [TokenTree.chain([1] * count, [0.9] * count) for count in nodes]
        jobs: list[Any] = [
            Mock(sequence=each, tree=tree) for each, tree in zip(sequences, trees, strict=True)
        ]
        scheduler.admit(jobs, trees, 2, 18, 0)
        outputs = [StepOutput([1] * (count + 1), accepted=list(range(count))) for count in right]
        began, now = now, now + seconds
        scheduler.stepped(began, now, outputs)

    for _ in range(30):
        step(1.0, (0, 0), (0, 0))
    before = [scheduler._state(each).own.balance for each in sequences]
    for each in sequences:
        scheduler.budget_sent(each, 8)
    step(3.0, (9, 1), (9, 0))
    gains = [
        scheduler._state(each).own.balance - old
        for each, old in zip(sequences, before, strict=True)
    ]
    assert gains == pytest.approx([10 - 1 - 2 * 2 * 0.9, 1 - 1 - 2 * 2 * 0.1], abs=0.01)


def test_losses_are_bounded_whatever_a_drafter_does() -> None:
    one, now, lost = state(), 0.0, 0.0
    for _ in range(20_000):
        if one.own.balance > 0:
            one.requested(now, 8)
            now += 4.0
            lost += 3.0
            one.answered(now, 1, tree=True)
        else:
            one.requested(now, 0)
            now += 1.0
            one.answered(now, 1, tree=False)
    assert 0 < lost < 0.025 * now + 20


def test_one_stall_does_not_suspend_a_drafter_that_pays_for_long() -> None:
    paying, unknown = state(Account(balance=10.0)), state()
    for one in (paying, unknown):
        lose(one, 100.0)
    assert unknown.own.balance < -20 < -3 < paying.own.balance <= 0


def test_sequences_learn_from_each_other_while_they_run() -> None:
    drafters = Drafters()
    for name, gain in (("good", 2.0), ("bad", -2.0)):
        one = state(drafters.of(name))
        for _ in range(8):
            lose(one, -gain)
    balances = {name: state(drafters.of(name)).own.balance for name in ("bad", "other", "good")}
    assert balances["bad"] < 0 < balances["other"] <= balances["good"]
    waiting = {name: state(drafters.of(name)) for name in ("good", "bad")}
    for one in waiting.values():
        one.own.balance = -1.0
        one.answered(0.0, 10, tree=False)
    assert waiting["good"].own.balance > waiting["bad"].own.balance > -1.0


def test_clients_cannot_make_it_remember_any_number_of_names() -> None:
    drafters = Drafters()
    kept = drafters.of("used all the time")
    for number in range(1000):
        drafters.of(str(number))
        assert drafters.of("used all the time") is kept
    assert len(drafters.to_json()) < 100


def test_plain_steps_are_measured_before_anybody_drafts_and_again_later() -> None:
    clock = PlainClock()
    assert not clock.known(4)
    for _ in range(60):
        clock.observe(4, seconds=1.25, predicted=1.0)
    assert clock.known(4)
    assert clock.known(16), "the nearest load counts"
    clock.advance(16, seconds=5.0, predicted=1.0)
    assert clock.now == pytest.approx(4.0)
    for _ in range(500):
        clock.drafted(16)
    assert clock.known(4)
    assert not clock.known(16)


def test_a_plain_step_is_reported_by_those_of_this_process_alone() -> None:
    clock, earlier = PlainClock(), PlainClock()
    for _ in range(20):
        earlier.observe(1, 9.0, 1.0)
    clock.load_json(earlier.to_json())
    assert clock.known(1)
    for _ in range(7):
        clock.observe(1, 3.0, 1.0)
    assert clock.measured(1, 2.0) == 0
    clock.observe(1, 3.0, 1.0)
    assert clock.measured(1, 2.0) == pytest.approx(6.0)
    assert clock.measured(16, 1.0) == pytest.approx(3.0), "the nearest load counts"


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


def test_node_budgets_follow_what_is_admitted() -> None:
    account = Account(nodes=64.0)
    account.admitted(drafted=64, admitted=4)
    assert 48 <= account.nodes < 64, "one tree says little about the next"
    for _ in range(40):
        account.admitted(drafted=round(account.nodes), admitted=4)
    assert round(account.nodes) == 16
    for _ in range(20):
        account.admitted(drafted=round(account.nodes), admitted=round(account.nodes))
    assert account.nodes > 64


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
