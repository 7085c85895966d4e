"""Whether drafting pays under this load, for one sequence and for all of them."""

from __future__ import annotations

from paceline.verifier.scheduler.trust import Trust

_NEWEST = 0.2  # weight of the newest round in a sequence's means
_NEWEST_SHARED = 0.05  # and in those of all sequences
_FIRST_PROBE, _LAST_PROBE = 128, 1024  # tokens between probes: the least and the most
_GROWTH = 8  # nodes that a budget grows by at least, where all that was sent was admitted


class Means:
    """Running means of drafted rounds.

    A round's price is the time from one answer to the next, drafting and travel included, over
    that of a plain step under the same load: what the sequence might have emitted meanwhile.
    """

    def __init__(self, newest: float, like: Means | None = None) -> None:
        self._newest = newest
        self.emitted: float | None = like.emitted if like else None
        """Tokens a round emits; None until one was seen."""
        self._prices: dict[int, float] = dict(like._prices) if like else {}

    def learn(self, load: int, emitted: float, price: float) -> None:
        """Take in a round that was run with so many sequences alive."""
        self.emitted = self._mixed(self.emitted, emitted)
        level = _level(load)
        self._prices[level] = self._mixed(self._prices.get(level), price)

    def price(self, load: int) -> float | None:
        """What a round costs under a load, or under the nearest that was seen."""
        level = _level(load)
        if not self._prices:
            return None
        return self._prices[min(self._prices, key=lambda seen: (abs(seen - level), seen))]

    def pays(self, load: int) -> bool:
        """Whether rounds emit what they cost; true until something is known."""
        price = self.price(load)
        return self.emitted is None or price is None or self.emitted >= price

    def _mixed(self, mean: float | None, value: float) -> float:
        return value if mean is None else mean + self._newest * (value - mean)


class Shared:
    """What all sequences showed: where new ones begin."""

    def __init__(self) -> None:
        self.means = Means(_NEWEST_SHARED)
        self.trust = Trust()


class Outlook:
    """What the scheduler knows of one sequence.

    Attributes:
        trust: How far its confidences are to be believed.
        answered: Time of the scheduler's clock when a step last served it. Unit: plain steps.
        seen: When that was, or when it began to wait for a step (time.perf_counter).
        closed: Its last budget was 0, but for probes.
    """

    def __init__(self, shared: Shared, most: int) -> None:
        self.trust = Trust(shared.trust)
        self.answered: float | None = None
        self.seen = 0.0
        self.closed = False
        self._shared = shared
        self._means = Means(_NEWEST, shared.means)
        self._most = most
        self._budget = most
        # What others showed may be another drafter's doing: each sequence has a round of its own.
        self._emitted_closed = self._probe_after = _FIRST_PROBE

    def checked(self, drafted: int, admitted: int) -> None:
        """A tree was cut to ``admitted`` of its ``drafted`` nodes.

        The next one may be somewhat larger, so that it is seen when more would pay again.
        """
        if admitted == drafted:
            self._budget = min(self._most, max(self._budget, 2 * drafted, drafted + _GROWTH))
        else:
            self._budget = min(self._most, admitted + max(2, admitted // 2))

    def drafted(self, load: int, emitted: int, price: float) -> None:
        """A round with a tree was answered."""
        self._means.learn(load, emitted, price)
        self._shared.means.learn(load, emitted, price)
        if self.closed:  # it was a probe
            self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        self._emitted_closed = 0

    def ran(self, emitted: int) -> None:
        """Tokens came out of a free run."""
        self._emitted_closed += emitted

    def budget(self, load: int) -> int:
        """Most nodes to draft next.

        One sequence alone takes nothing from others: there its client's own clock decides.

        Args:
            load: Sequences alive.
        """
        if load < 2 or self._means.pays(load):
            self.closed = False
            self._probe_after = _FIRST_PROBE
            return self._budget
        self.closed = True
        return self._budget if self._emitted_closed >= self._probe_after else 0


def _level(load: int) -> int:
    """Loads that are taken for alike: 1, 2, 3 to 4, 5 to 8, ..."""
    return (load - 1).bit_length()
