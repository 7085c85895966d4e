"""What a scheduler learns: where drafting pays, and how far drafters are to be believed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from simulated_load import MODES, Accepted, Simulation

from paceline.verifier.engine.tree import NO_TREE, DraftTree
from paceline.verifier.scheduler import scheduler as scheduler_module
from paceline.verifier.scheduler.admission import Step
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.experience import Account, Asks, Experiences, Means
from paceline.verifier.scheduler.outlook import Outlook
from paceline.verifier.scheduler.plain import PlainSpeed
from paceline.verifier.scheduler.quiet import Served
from paceline.verifier.scheduler.scheduler import Scheduler
from paceline.verifier.scheduler.trust import Trust


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


@pytest.mark.parametrize(("gap", "pays"), [(15, True), (100, False)])
def test_places_to_draft_are_found_where_that_pays(gap: float, pays: bool) -> None:
    rate = rates(here_and_there(gap, 10), 1, 4000)
    assert (rate["fixed"] > 1.1 * rate["plain"]) == pays
    assert rate["scheduled"] > 0.97 * max(rate["plain"], rate["fixed"])


def test_what_an_ask_is_worth_depends_on_how_long_nothing_stood() -> None:
    asks = Asks()
    assert asks.gain(1, 3) is None
    for _ in range(300):
        asks.learn(1, 2, 3.0)
        asks.learn(1, 40, -0.5)
    assert (asks.gain(1, 2) or 0) > 0 > (asks.gain(1, 50) or 0)
    assert asks.gain(1, 500) == asks.gain(1, 50), "the nearest that was seen"
    assert asks.gain(1, 2, losing=True) == asks.gain(1, 2), "no sequence has lost by it yet"
    for _ in range(50):
        asks.learn(1, 2, -1.0, losing=True)
    assert (asks.gain(1, 2) or 0) > 0 > (asks.gain(1, 2, losing=True) or 0)


def test_plain_steps_are_booked_before_anything_depends_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(step=1e-4)
    monkeypatch.setattr(scheduler_module, "perf_counter", lambda: next(clock))
    costs = CostTable((1, 512), (1, 2048), ((1.0, 1.0), (2.0, 2.0)))
    scheduler = Scheduler(costs, 255)
    sequence: Any = Mock(drafter="some", committed=9)
    round_: Any = Mock(sequence=sequence)
    round_.tree = NO_TREE
    walk: Any = Mock(tokens=[1], path=[], finish=None)
    scheduler.told(sequence, 0)

    def run(steps: int) -> None:
        for _ in range(steps):
            began = next(clock)
            scheduler.admit([round_], [NO_TREE], Step(1, 9, 1))
            scheduler.stepped(began, next(clock), [Served(round_, NO_TREE, walk)])

    run(30)
    assert scheduler._unbooked, "they wait for more of them"
    before = scheduler._clock
    scheduler.told(sequence, 0)
    assert scheduler._clock > before
    run(3)
    scheduler.forget(sequence)
    assert not scheduler._unbooked
    assert not scheduler._outlooks


def test_a_drafter_that_never_drafts_costs_next_to_nothing() -> None:
    rate = rates(lambda *_: None, 4)
    assert rate["scheduled"] > 0.97 * rate["plain"]


def test_names_share_what_drafting_brought_and_no_others_do() -> None:
    experiences = Experiences()
    for name, emitted in (("good", 5), ("bad", 1)):
        for _ in range(50):
            experiences.of(name).means.learn(8, emitted=emitted, price=3.0)
    assert Outlook(experiences.of("good"), 255, drafts=True).pays(8)
    assert not Outlook(experiences.of("bad"), 255, drafts=True).pays(8)
    assert not Outlook(experiences.of("other"), 255, drafts=True).pays(8), "nobody knows"


def test_clients_cannot_make_it_remember_any_number_of_names() -> None:
    experiences = Experiences()
    kept = experiences.of("used all the time")
    for number in range(1000):
        experiences.of(str(number))
        assert experiences.of("used all the time") is kept
    assert len(experiences._named) < 100


def test_what_one_load_showed_does_not_close_another() -> None:
    means = Means()
    for _ in range(50):
        means.learn(2, emitted=3, price=2.0)
        means.learn(32, emitted=3, price=5.0)
    assert (means.gain(2) or 0) > 0 > (means.gain(30) or 0)


def test_an_account_bounds_what_is_lost_whatever_the_means_say() -> None:
    account, lost = Account(1), 0.0
    for _ in range(10_000):
        account.passed(1.0)
        if account.balance > 0:
            account.settle(-3.0)
            lost += 3.0
    assert lost < 0.01 * 10_000 + 20


def test_trials_lose_no_more_than_their_own_share_whatever_others_gain() -> None:
    account, lost = Account(1), 0.0
    for _ in range(10_000):
        account.passed(1.0)
        account.settle(2.0)
        if account.trying:
            account.settle(-3.0, trial=True)
            lost += 3.0
    assert 0 < lost < 0.004 * 10_000 + 20, "the less, the longer none of them finds anything"
    account.settle(8.0, trial=True)
    assert account.trying, "a trial that found something lets others try"


def draft(one: Outlook, rounds: int, emitted: int) -> None:
    """Rounds with trees, each of which takes two plain steps and may be followed by another."""
    one.told(1, 8, 0.0)
    for number in range(1, rounds + 1):
        one.answered(1, emitted, 2.0 * number, tree=True)
        one.told(1, 8, 2.0 * number)


def test_a_sequence_that_lost_by_asking_is_judged_by_others_that_did() -> None:
    experience = Experiences().of("some")
    for _ in range(50):
        experience.asks.learn(1, 1, 1.0)
        experience.asks.learn(1, 1, -1.0, losing=True)
    new, tried = (Outlook(experience, 64, drafts=True) for _ in range(2))
    assert new.pays(1)
    draft(tried, rounds=2, emitted=1)
    assert not tried.pays(1)
    assert new.pays(1)


def test_what_an_ask_brings_counts_although_the_text_ends_first() -> None:
    one = outlook()
    draft(one, rounds=3, emitted=5)
    assert one.experience.asks.gain(1, 1) is None, "it goes on"
    one.ended()
    assert one.experience.asks.gain(1, 1) == pytest.approx(3 * 3.0)


def test_plain_steps_are_measured_before_drafting_is_judged_and_again_later() -> None:
    plain = PlainSpeed()
    assert not plain.known(4)
    for _ in range(60):
        plain.quiet(4, emitted=4, time=1.25)
    assert plain.known(4)
    assert plain.rate(4) == pytest.approx(0.8, rel=0.02)
    assert plain.rate(16) == plain.rate(4), "the nearest level that was seen"
    for _ in range(2000):
        plain.disturbed(4)
    assert not plain.known(4)


def outlook() -> Outlook:
    return Outlook(Experiences().of("some"), 64, drafts=True)


def test_budgets_follow_what_is_admitted() -> None:
    one = outlook()
    one.checked(drafted=64, admitted=4)
    assert 48 <= one.nodes < 64, "one tree says little about the next"
    for _ in range(40):
        one.checked(drafted=one.nodes, admitted=4)
    assert one.nodes == 6
    one.checked(drafted=6, admitted=6)
    one.checked(drafted=14, admitted=14)
    assert one.nodes > 14, "it grows while all is admitted"
    for _ in range(9):
        one.checked(drafted=one.nodes, admitted=one.nodes)
    assert one.nodes == 64


@pytest.mark.parametrize("truth", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("told", [0.3, 0.6, 0.95])
def test_trust_makes_survivals_come_true(told: float, truth: float) -> None:
    chance, trust = random.Random(1), Trust()
    tree = DraftTree([1] * 4, [-1, 0, 1, 2], [told] * 4)
    for _ in range(300):
        stood = 0
        while stood < 4 and chance.random() < truth:
            stood += 1
        trust.learn(tree.survivals, stood)
    expected = sum(truth**depth for depth in range(1, 5))
    believed = float((tree.survivals**trust.exponent).sum())
    assert believed == pytest.approx(expected, rel=0.35)


def test_trust_survives_any_confidence() -> None:
    trust = Trust()
    for told in (0.0, 1.0):
        tree = DraftTree([1] * 255, list(range(-1, 254)), [told] * 255)
        trust.learn(tree.survivals, 0)
        assert np.isfinite(trust.exponent)
        assert np.all(np.diff(tree.survivals) <= 0)
