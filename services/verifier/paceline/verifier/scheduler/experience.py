"""What drafting cost and brought: for one sequence, and for all that share a drafter's name."""

from __future__ import annotations

from collections import OrderedDict

from paceline.verifier.scheduler.plain import level_of
from paceline.verifier.scheduler.trust import Trust

_NEWEST = 0.05  # weight of the newest round in a sequence's means
_PROBE = 0.5  # and of one that was let draft to see whether it pays by now
_NEWEST_SHARED = 0.05  # weight in the means of all sequences
_NEWEST_TOLL = 0.2
_NEWEST_ASK = 0.02  # weight of the newest ask: what most of them bring, a few bring
_PRIOR = 8  # rounds that the means of all count for where a sequence begins
# Of the time that passes: what drafting that does not pay may cost at most, what it may in any
# case, and what more for the part of trials that gained.
_SHARE, _LEAST_SHARE, _SHARE_OF_HITS = 0.007, 0.002, 0.02
_FIRST_HITS, _NEWEST_TRIAL = 0.25, 0.1  # that part at first, and the weight of the newest trial
_LEAST, _MOST = -8.0, 64.0  # bounds of an account. Unit: plain steps
_FIRST = 8.0  # what an account for one sequence begins with, and all that trials may save up
_ENOUGH = 2.0  # for several to try
_MOST_NAMES = 64


class ByLevel:
    """Running means by load level. Where a level was never seen, the nearest one is taken."""

    def __init__(self, newest: float, like: ByLevel | None = None) -> None:
        """See nothing yet; or begin with what ``like`` saw, as if it were some samples."""
        self._newest = newest
        self._means: dict[int, tuple[float, int]] = {}
        if like is not None:
            self._means = {
                level: (mean, min(count, _PRIOR)) for level, (mean, count) in like._means.items()
            }

    def learn(self, load: int, value: float, weight: float = 0.0) -> None:
        """Take in a sample that counts for such a part of the mean at least."""
        level = level_of(load)
        mean, count = self._means.get(level, (0.0, 0))
        mean += max(self._newest, weight, 1 / (count + 1)) * (value - mean)
        self._means[level] = mean, count + 1

    def at(self, load: int) -> float | None:
        """The mean under a load; None: nothing was seen."""
        level = level_of(load)
        if level not in self._means:
            nearest = min(self._means, key=lambda seen: (abs(seen - level), seen), default=None)
            if nearest is None:
                return None
            level = nearest
        return self._means[level][0]


class Means:
    """Running means of drafted rounds.

    A round's price is the time from one answer to the next, drafting and travel included, in
    tokens that the sequence would have got in plain steps meanwhile.
    """

    def __init__(self, like: Means | None = None) -> None:
        newest = _NEWEST_SHARED if like is None else _NEWEST
        self._emitted: ByLevel = ByLevel(newest, like._emitted if like else None)
        self._prices: ByLevel = ByLevel(newest, like._prices if like else None)

    def learn(self, load: int, emitted: int, price: float, *, probe: bool = False) -> None:
        """Take in a round that was run with so many sequences alive."""
        weight = _PROBE if probe else 0.0
        self._emitted.learn(1, emitted, weight)  # it is the same under any load
        self._prices.learn(load, price, weight)

    def gain(self, load: int) -> float | None:
        """Tokens that a round brings beyond its price; None: nothing is known."""
        emitted, price = self._emitted.at(1), self._prices.at(load)
        return None if emitted is None or price is None else emitted - price


class Asks:
    """What asking a drafter brought, by how long no drafted token had stood then.

    Some drafters have something to say in some places only, and such places lie together: the
    longer nothing stood, the less likely that the next tree will. They also have more to say in
    some texts than in others: sequences that lost by asking so far are told apart. An ask is worth
    what its round gained, and the rounds after it up to the first of which nothing stood.
    """

    def __init__(self) -> None:
        self._gains: dict[bool, dict[int, ByLevel]] = {False: {}, True: {}}

    def learn(self, load: int, since: int, gain: float, *, losing: bool = False) -> None:
        """An ask, so many tokens after a drafted one had stood, and what followed from it."""
        place, gains = since.bit_length(), self._gains[losing]
        if place not in gains:
            gains[place] = ByLevel(_NEWEST_ASK, self._nearest(place, losing))
        gains[place].learn(load, gain)

    def gain(self, load: int, since: int, *, losing: bool = False) -> float | None:
        """Tokens that such an ask brings beyond its price; None: nothing is known."""
        found = self._nearest(since.bit_length(), losing)
        return None if found is None else found.at(load)

    def _nearest(self, place: int, losing: bool) -> ByLevel | None:
        gains = self._gains[losing] or self._gains[not losing]
        nearest = min(gains, key=lambda seen: (abs(seen - place), seen), default=None)
        return None if nearest is None else gains[nearest]


class Account:
    """What drafting may still lose under a load. Unit: plain steps of all who are alive.

    A small share of the time that passes is paid in, the smaller, the fewer of those who tried of
    late gained by it. Rounds pay in what they gain and draw what they lose, to the sequence and to
    all others. Nobody drafts on an empty account: whatever the means believe, drafting cannot take
    more than that share for long. It begins with something, to find out soon where drafting pays,
    and with less where many are alive: there it seldom does. Bounds keep old gains from paying for
    new losses, and one odd measurement from closing it for good.

    Those who try whether drafting pays have an allowance of their own, of the same share. What
    texts gain in which it pays would else be lost again, and unseen, in those where it does not.

    Attributes:
        balance: What is there.
        trying: Whether sequences may draft for which it did not pay so far, once their allowance
            is enough for several of them.
    """

    def __init__(self, load: int) -> None:
        """Begin under such a load."""
        self.balance = self._allowance = _FIRST / load
        self._hits = _FIRST_HITS
        self.trying = True

    def passed(self, steps: float) -> None:
        """Time went by."""
        share = min(_SHARE, _LEAST_SHARE + _SHARE_OF_HITS * self._hits) * steps
        self._set(self.balance + share, self._allowance + share)

    def settle(self, gain: float, *, trial: bool = False) -> None:
        """A round is over, of a sequence that tried or of one for which drafting paid so far."""
        if trial:
            self._hits += _NEWEST_TRIAL * ((gain > 0) - self._hits)
        self._set(max(_LEAST, self.balance + gain), self._allowance + gain * trial)

    def _set(self, balance: float, allowance: float) -> None:
        self.balance = min(_MOST, balance)
        self._allowance = min(_FIRST, max(_LEAST, allowance))
        self.trying = self._allowance >= _ENOUGH or (self.trying and self._allowance > 0)


class Experience:
    """What all sequences of one drafter's name showed: where new ones begin.

    Attributes:
        means: Of their rounds with trees.
        asks: Of all their rounds, by how long nothing had stood.
        tolls: What a round cost all the others who were alive. Unit: tokens.
        trust: How far confidences are to be believed.
        nodes: Nodes that the next tree of a sequence was allowed last; None: no tree was seen.
    """

    def __init__(self) -> None:
        self.means = Means()
        self.asks = Asks()
        self.tolls = ByLevel(_NEWEST_TOLL)
        self.trust = Trust()
        self.nodes: int | None = None
        self._accounts: dict[int, Account] = {}

    def account(self, load: int) -> Account:
        """The account of a load level."""
        return self._accounts.setdefault(level_of(load), Account(load))


class Experiences:
    """By name. Clients choose names: only those of late are kept."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, Experience] = OrderedDict()

    def of(self, name: str) -> Experience:
        """What is known of a name."""
        found = self._named.setdefault(name, Experience())
        self._named.move_to_end(name)
        while len(self._named) > _MOST_NAMES:
            self._named.popitem(last=False)
        return found

    def passed(self, load: int, steps: float) -> None:
        """Time went by, measured in plain steps."""
        for experience in self._named.values():
            experience.account(load).passed(steps)
