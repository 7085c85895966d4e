"""The controller: drafting goes on where it pays and costs next to nothing elsewhere."""

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.replay.simulation import MODES, Generation, Simulation
from paceline.tree import EMPTY, TokenTree
from paceline.verifier.scheduler.controller import Account, Drafters, SequenceState
from paceline.verifier.scheduler.costs import CostTable
from paceline.verifier.scheduler.scheduler import Scheduler

# Simulated drafters, texts and machines, by chance. Times are in plain steps of one sequence.

STEP = 0.005  # duration of a plain step of one sequence, in seconds
CONTEXT = 200
_NODES = 8

Accepted = Callable[[int, int, random.Random], int | None]
"""Number of drafted tokens that are accepted, by the number of the generation and its number of
tokens so far; None: the tree is empty."""


@dataclass(frozen=True)
class Costs:
    """Durations. Unit: plain steps of one sequence."""

    token: float = 0.06  # one more row of a step
    drafting: float = 0.5  # a draft of one sequence; the first of a sequence takes twice as long
    batched: float = 0.1  # one more sequence in the same draft, as a part of ``drafting``
    beside: float = 0.15  # messages and waking up, in each drafted round
    contention: float = 0.5  # by how much a step is longer for each unit of draft beside it
    noise: float = 0.1  # part by which durations vary
    slow: float = 1.0  # factor of all durations in every second phase of 500 steps


class ByChance:
    """A load whose texts, drafts and durations are drawn."""

    asked = True

    def __init__(self, accepted: Accepted, costs: Costs, length: int) -> None:
        self._accepted, self._costs, self._length = accepted, costs, length
        self._random = random.Random(0)
        self._passed = 0.0
        longest = STEP * (1 + costs.token * 511)
        self.table = CostTable((1, 512), (STEP, longest))

    def length(self, number: int) -> int:
        return self._length

    def context(self, each: Generation) -> int:
        return CONTEXT

    def tree(self, each: Generation) -> TokenTree:
        if self._accepted(each.number, each.got, self._random) is None:
            return EMPTY
        return TokenTree.chain([1] * _NODES, [0.8] * _NODES)

    def accepted(self, each: Generation, tree: TokenTree) -> int:
        return min(self._accepted(each.number, each.got, self._random) or 0, len(tree))

    def draft_seconds(self, drafted: Sequence[Generation]) -> float:
        first = not all(each.opened for each in drafted)
        steps = self._costs.drafting * (1 + first + self._costs.batched * (len(drafted) - 1))
        return self._duration(steps)

    def beside_seconds(self, each: Generation) -> float:
        return self._duration(self._costs.beside)

    def step_seconds(
        self, here: Sequence[Generation], trees: Sequence[TokenTree], drafting: float
    ) -> float:
        rows = sum(map(len, trees)) + len(here)
        took = self._duration(1 + self._costs.token * (rows - 1))
        took += self._costs.contention * min(took, drafting)
        self._passed += took / STEP
        return took

    def _duration(self, steps: float) -> float:
        slow = self._costs.slow if self._passed // 500 % 2 else 1.0
        noise = self._costs.noise
        return STEP * steps * slow * self._random.uniform(1 - noise, 1 + noise)


class Drawn(Simulation):
    def __init__(
        self, accepted: Accepted, users: int, mode: str, costs: Costs | None = None, kinds: int = 1,
        length: int = 128,
    ) -> None:  # fmt: skip
        self._kinds = kinds
        super().__init__(ByChance(accepted, costs or Costs(), length), users, mode)

    def speeds(self, steps: float) -> dict[int, float]:
        """Go on for so many plain steps. Returns the tokens of a generation in the time of a plain
        step of one sequence, by kind: generations whose number has the same rest are of the same
        kind."""
        found: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for number, (tokens, seconds) in self.run(steps * STEP).items():
            had, took = found[number % self._kinds]
            found[number % self._kinds] = had + tokens, took + seconds / STEP
        return {kind: found[kind][0] / found[kind][1] for kind in sorted(found)}


FLAT, STEEP = Costs(), Costs(token=0.25)
SLOW, DRIFT = Costs(drafting=50.0, contention=0.2), Costs(slow=1.27)
LOOKUP = Costs(drafting=0.04, contention=0.1)


def drawn(chance: float, draws: random.Random) -> int:
    """Accepted tokens of a drafter whose tokens are right with such a chance each."""
    count = 0
    while count < 8 and draws.random() < chance:
        count += 1
    return count


def right(chance: float) -> Accepted:
    return lambda user, got, draws: drawn(chance, draws)


def right_until(token: int, before: float, after: float) -> Accepted:
    return lambda user, got, draws: drawn(before if got < token else after, draws)


def right_for(one: float, other: float) -> Accepted:
    return lambda user, got, draws: drawn(other if user % 2 else one, draws)


def copied(run: int, gap: int) -> Accepted:
    """Look-up in texts that copy so many tokens, then write so many new ones."""

    def accepted(user: int, got: int, draws: random.Random) -> int | None:
        place = (got + 13 * user) % (run + gap)
        return min(8, run - place) if place < run else None if place % 5 else 0

    return accepted


CELLS: dict[str, tuple[Accepted, Costs, int]] = {
    "never right": (right(0.1), FLAT, 1),
    "often right": (right(0.8), FLAT, 1),
    "nearly always right": (right(0.95), FLAT, 1),
    "worse midway": (right_until(64, 0.9, 0.1), FLAT, 1),
    "two kinds of texts": (right_for(0.3, 0.9), FLAT, 2),
    "steep steps, never right": (right(0.1), STEEP, 1),
    "steep steps, nearly always right": (right(0.95), STEEP, 1),
    "a slow drafter": (right(0.8), SLOW, 1),
    "a machine that changes its speed": (right(0.8), DRIFT, 1),
    "look-up that pays": (copied(10, 10), LOOKUP, 1),
    "look-up that does not pay": (copied(8, 60), LOOKUP, 1),
}
"""By name the drafter, durations, and kinds of texts that are measured apart with one user."""


def ratio(cell: str, users: int) -> float:
    """Speed with the controller over the better of none and always, in the worst kind of texts.

    It is the steady state: an earlier part of the load is not counted.
    """
    accepted, costs, kinds = CELLS[cell]
    warm = 500 if users == 1 else 250  # tokens of each user
    found = {}
    for mode in MODES:
        load = Drawn(accepted, users, mode, costs, kinds if users == 1 else 1)
        load.speeds(warm)
        found[mode] = load.speeds(4 * warm)
    return min(
        speed / max(found["plain"][kind], found["always"][kind])
        for kind, speed in found["scheduled"].items()
    )


@pytest.mark.parametrize("users", [1, 8])
def test_nothing_is_lost_beside_the_better_of_none_and_always(users: int) -> None:
    cells = [*CELLS][:: 1 if users == 1 else 2]
    found = {cell: round(ratio(cell, users), 3) for cell in cells}
    assert min(found.values()) > 0.95, found


@pytest.mark.parametrize("users", [1, 8])
def test_a_fresh_service_loses_one_draft_and_a_few_plain_tokens(users: int) -> None:
    """Of a drafter that answers after 50 plain steps (the first time 100): each user waits once."""
    slow = Drawn(right(0.8), users, "scheduled", SLOW, length=2000)
    slow.speeds(1000)
    assert slow.rounds <= users
    for cell in ("never right", "often right"):
        accepted, costs, _ = CELLS[cell]
        tokens = {
            mode: sum(Drawn(accepted, users, mode, costs).speeds(200).values()) * 200 * users
            for mode in MODES
        }
        assert max(tokens["plain"], tokens["always"]) - tokens["scheduled"] < 32 * users


def test_sequences_differ_and_each_gets_its_own_way() -> None:
    """Every fourth one is easy to draft for, and the others are not."""

    def accepted(user: int, got: int, draws: random.Random) -> int:
        return drawn(0.05 if user % 4 else 0.95, draws)

    speeds = {mode: Drawn(accepted, 1, mode).speeds(4000)[0] for mode in MODES}
    assert speeds["scheduled"] > max(speeds["plain"], speeds["always"])


@pytest.mark.parametrize(
    ("texts", "length", "costs", "steps", "speed"),
    [(0, 9000, Costs(), 3500, 3800 / 3500), (40, 100, Costs(drafting=2.0), 16000, 1.2)],
)
def test_a_drafter_that_becomes_good_is_noticed(
    texts: int, length: int, costs: Costs, steps: int, speed: float
) -> None:
    """In a long text within a hundred tokens, after thousands in which it was never right; and in
    short ones, each of which ends before a sequence that lost would try again."""

    def accepted(user: int, got: int, draws: random.Random) -> int:
        return drawn(0.0 if user < texts or (not texts and got < 3000) else 0.9, draws)

    load = Drawn(accepted, 1, "scheduled", costs, length=length)
    assert load.speeds(steps)[0] > speed


class Reader:
    """A text of a drafter that reads ``prompt`` tokens of it first, in steps that take ``slow``
    times as long, and then brings ``tokens`` more in the time of ``cost`` plain ones."""

    def __init__(self, drafter: Account, prompt: int, slow: float = 2.0) -> None:
        self.state, self.now = SequenceState(drafter, 0.0, prompt), 0.0
        self.unread, self.slow, self.got = prompt, slow, 0

    def step(self, local: float = 0.0, tokens: float = 2.0, cost: float = 1.0) -> bool:
        """A step beside a local tree; whether its drafter was asked for one, or reads."""
        asked = self.state.drafts and self.state.asks(local)
        drafts = asked and self.unread <= 0
        if asked and not drafts:
            self.state.opening(self.now)
            self.unread -= 50
        else:
            self.state.requested(self.now, 8 if drafts else 0)
        self.now += 1.0 + cost if drafts else self.slow if asked else 1.0
        got = round(1.0 + tokens) if drafts else 1
        self.got += got
        self.state.answered(self.now, got, tree=drafts)
        return asked


def known(drafter: Account, texts: int = 20) -> Account:
    """The drafter after short texts with short prompts."""
    for _ in range(texts):
        text = Reader(drafter, 50)
        while text.got < 100:
            text.step()
        text.state.end()
    return drafter


def test_a_text_is_read_where_drafts_gain_more_than_that_costs() -> None:
    """A step that reads 50 tokens costs one plain token, and a draft gains one."""
    drafter = known(Account())
    assert drafter.reading == pytest.approx(1 / 50, rel=0.2)
    short = Reader(drafter, 100)
    assert any(short.step() for _ in range(4))
    longer = Reader(drafter, 4000)
    asked = [longer.step() for _ in range(400)]
    assert not any(asked[:100])
    assert all(asked[-200:]), "a text that goes on is worth it in the end"
    covered = Reader(drafter, 100)
    assert not any(covered.step(local=2.0) for _ in range(400)), "nothing is left open"
    useless = Reader(known(Account(tokens=0.0)), 4000)
    assert not any(useless.step(tokens=0.0) for _ in range(100))


def test_a_drafter_is_tried_again_after_a_disturbed_time() -> None:
    drafter = known(Account())
    drafter.cost, drafter.reading = 10.0, 2.0
    for _ in range(60):
        text = Reader(drafter, 100)
        if any(text.step(local=0.3) for _ in range(100)):
            return
        text.state.end()
    pytest.fail("it is never asked again")


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.1, 4.0)), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_no_sequence_of_rounds_makes_drafting_cost_more_than_a_few_percent(
    rounds: list[tuple[int, float]],
) -> None:
    """Whatever a draft brings and costs, again and again, in texts of 200 tokens."""
    drafter, took, got = Account(), 0.0, 0
    outcomes = itertools.cycle(rounds)
    for _ in range(40):
        text = Reader(drafter, 20)
        text.unread = 0
        while text.got < 200:
            tokens, cost = next(outcomes)
            text.step(tokens=tokens, cost=cost)
        text.state.end()
        took, got = took + text.now, got + text.got
    assert took <= 1.05 * got + 64


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
    first._drafters.of("some").cost = 3.0
    second.load_json(json.loads(json.dumps(first.to_json())))
    assert second.to_json() == first.to_json()
    assert second._clock.known(1)
    assert second._drafters.of("some").cost == 0.0, "it was that machine's at that time"
    for damaged in ([], {}, {"plain": {}, "drafters": {"x": 1}, "costs": {}}):
        with pytest.raises((TypeError, KeyError, AttributeError)):
            Scheduler(costs, 255).load_json(damaged)


@pytest.mark.parametrize(("drafted", "truth"), [(0.3, 0.8), (0.6, 0.5), (0.95, 0.2), (0.3, 0.2)])
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
