"""Whether a sequence drafts: the controller.

The unit of everything here is a plain token: a token that the sequence would have been given in
plain decoding. :class:`PlainClock` turns wall-clock time into them. A drafted interval goes from
the request of a tree to the end of the step that verifies it. It brings the emitted tokens and
costs the plain tokens that passed, whether in the draft, on the way, in a queue or in the step. If
drafted nodes make a step longer, each tree pays in proportion to its nodes, for all sequences in
the step. The difference is the gain of the interval.

A sequence drafts while its balance is above 0. Gains and losses of drafted intervals change the
balance; in plain decoding it rises by a small share of the emitted tokens. So drafting that does
not pay costs at most that share of the time, and drafting that pays goes on. This needs no schedule
of explorations, and a method that seldom drafts but then gains much (``ngram``) pays for its failed
attempts itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.verifier.scheduler.admission import OnlineCalibration

_SHARE = 0.02  # of plain tokens that exploration may cost
_SHARE_IF_PAYING = 0.05  # the same while the drafter's mean gain is above 0
_START = 2.0  # balance of a new sequence of an unknown drafter. Unit: plain tokens
_START_INTERVALS = 10.0  # mean gains of its drafter that are added to it
_MAX_START = 5.0  # maximum balance of a new sequence. Unit: plain tokens
_MAX = 16.0  # maximum balance: what a change for the worse can cost. Unit: plain tokens
_MIN = -32.0  # minimum balance: the next attempt comes after 32 / 0.02 tokens
# The same for a drafter that was paying, here or for other sequences: a stall of the machine or a
# few bad rounds must not end drafting for long. Unit: plain tokens.
_MIN_IF_PAYING = -1.0
_NEWEST_GAIN = 0.05  # weight of the newest drafted interval in a drafter's mean gain
_NAMES = 64  # drafter names that are remembered; clients choose names

_KNOWN = 16  # plain steps after which the speed of plain decoding at a load is known
_STALE = 250  # steps beside drafting at a load after which it is measured again
_NEWEST = 0.05  # weight of the newest plain step
_OUTLIER = 5.0  # a plain step this many times longer than usual is left out
_MEASURED = 8  # plain steps of this process after which their speed is reported


def load_bucket(load: int) -> int:
    """Loads that share statistics: 1, 2, 3 to 4, 5 to 8, ... sequences."""
    return max(0, load - 1).bit_length()


@dataclass
class _PlainSpeed:
    ratio: float = 1.0
    steps: int = 0
    drafted: int = 0
    own_ratio: float = 1.0  # of this process alone; `ratio` may begin with that of an earlier one
    own_steps: int = 0


class PlainClock:
    """Counts plain tokens: how many each sequence would have been given since the start.

    The cost table predicts a plain step on an idle machine. The ratio of measured to predicted
    time, from the end of one step to the end of the next, is learnt at each load in steps
    without drafting sequences.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._speeds: dict[int, _PlainSpeed] = {}

    def known(self, load: int) -> bool:
        """Whether plain decoding was measured. Drafting starts afterwards.

        At a load that is new, the ratio of the nearest one counts until it is due.
        """
        return self._nearest(load).steps >= _KNOWN

    def measured(self, load: int, predicted: float) -> float:
        """Time of a plain step by those of this process; 0: there were too few. Unit: seconds."""
        speed = self._nearest(load)
        return predicted * speed.own_ratio if speed.own_steps >= _MEASURED else 0.0

    def advance(self, load: int, seconds: float, predicted: float) -> None:
        """Let wall-clock time pass; ``predicted`` is a plain step of all ``load`` sequences."""
        self.now += seconds / (predicted * self._nearest(load).ratio)

    def advance_beside_prefill(self) -> None:
        """A step of prompts alone ran: in plain decoding each sequence gets a token beside it."""
        self.now += 1.0

    def observe(self, load: int, seconds: float, predicted: float) -> None:
        """A step without drafting sequences took ``seconds`` from the end of the last step."""
        speed = self._at(load)
        ratio = seconds / predicted
        if ratio > _OUTLIER * speed.ratio and speed.steps:
            return
        speed.steps += 1
        speed.own_steps += 1
        speed.drafted = 0
        speed.ratio += max(_NEWEST, 1 / speed.steps) * (ratio - speed.ratio)
        speed.own_ratio += max(_NEWEST, 1 / speed.own_steps) * (ratio - speed.own_ratio)

    def drafted(self, load: int) -> None:
        """Count a step with drafting sequences. After many, plain steps are measured again."""
        speed = self._at(load)
        speed.drafted += 1
        if speed.drafted >= _STALE:
            speed.drafted, speed.steps = 0, _KNOWN // 2

    def _at(self, load: int) -> _PlainSpeed:
        """The speed of a load; a new one begins as a copy of the nearest."""
        return self._speeds.setdefault(load_bucket(load), replace(self._nearest(load)))

    def _nearest(self, load: int) -> _PlainSpeed:
        bucket = load_bucket(load)
        nearest = min(self._speeds, key=lambda seen: (abs(seen - bucket), seen), default=None)
        return _PlainSpeed() if nearest is None else self._speeds[nearest]

    def to_json(self) -> dict[str, Any]:
        """The ratios."""
        speeds = self._speeds.items()
        return {str(bucket): speed.ratio for bucket, speed in speeds if speed.steps >= _KNOWN}

    def load_json(self, stored: dict[str, Any]) -> None:
        """Take over ratios of an earlier process."""
        for bucket, ratio in stored.items():
            if 0.1 < float(ratio) < 100.0:
                self._speeds[int(bucket)] = _PlainSpeed(float(ratio), _KNOWN)


@dataclass
class DrafterStatistics:
    """What all sequences of one drafter name show; new ones start with it.

    Attributes:
        gain: Running mean of the gains of drafted intervals. Unit: plain tokens.
        nodes: Node budget of the sequence that was admitted last; None: there was none.
        calibration: Of its confidences.
        unspent: What ended sequences were allowed for an attempt and did not use. New ones start
            with it: short texts would otherwise end before the first attempt, one after the other.
            Unit: plain tokens.
    """

    gain: float = 0.0
    nodes: float | None = None
    calibration: OnlineCalibration = field(default_factory=OnlineCalibration)
    unspent: float = 0.0

    @property
    def start(self) -> float:
        """Balance of a new sequence by the mean gain alone. Unit: plain tokens."""
        return max(_MIN, min(_MAX_START, _START + _START_INTERVALS * self.gain))

    def observe(self, gain: float) -> None:
        """A drafted interval brought ``gain`` plain tokens."""
        self.gain += _NEWEST_GAIN * (max(_MIN, gain) - self.gain)


class SequenceState:
    """The controller's state of one sequence.

    Attributes:
        name: Name of its drafter; None: none drafts for it.
        drafter: Shared statistics of its drafter's name.
        calibration: Of its drafter's confidences.
        suspended: Whether no tree was requested for the last step.
        exploring: Whether it drafts again after a suspension and has gained nothing yet.
        interference: Tokens that its drafting took from others since its last answer, less those
            that theirs took from it.
        balance: See the module. Unit: plain tokens.
    """

    def __init__(self, drafter: DrafterStatistics, max_nodes: int, name: str | None) -> None:
        self.name = name
        self.drafter = drafter
        self.calibration = OnlineCalibration(drafter.calibration)
        self.suspended = True
        self.exploring = False
        self.interference = 0.0
        self._start = drafter.start
        taken = min(drafter.unspent, max(0.0, _START - self._start))
        drafter.unspent -= taken
        self.balance = self._start + taken
        self._max_nodes = max_nodes
        self._nodes = float(max_nodes) if drafter.nodes is None else drafter.nodes
        self._drafting = False
        self._answered: float | None = None

    @property
    def drafting(self) -> bool:
        """Whether the interval since the last answer is a drafted one."""
        return self._drafting

    @property
    def nodes(self) -> int:
        """Nodes to draft at most, if any at all."""
        return max(1, min(self._max_nodes, round(self._nodes)))

    def admitted(self, drafted: int, admitted: int) -> None:
        """A tree was cut to ``admitted`` nodes: the next may have twice as many and some more."""
        target = 2 * admitted + 8
        if target < self._nodes or admitted == drafted:
            self._nodes += 0.25 * (target - self._nodes)
            self._nodes = min(self._nodes, self._max_nodes)
        self.drafter.nodes = self._nodes

    def answered(self, now: float, emitted: int, *, tree: bool) -> None:
        """A step gave it tokens.

        Args:
            now: Reading of the plain clock.
            emitted: Number of tokens.
            tree: Whether it had a tree.
        """
        if self._answered is not None and (self._drafting or tree):
            gain = emitted - (now - self._answered) - self.interference
            paying = self.balance > _START or self.drafter.gain > 0
            min_balance = _MIN_IF_PAYING if paying else _MIN
            self.balance = min(_MAX, max(self.balance + gain, min(self.balance, min_balance)))
            self.drafter.observe(gain)
            self.exploring &= gain <= 0
        elif self.balance < _START:
            self.balance += (_SHARE_IF_PAYING if self.drafter.gain > 0 else _SHARE) * emitted
        # The interval after a tree counts too: the way back to plain decoding is part of its cost.
        self._drafting = tree
        self._answered, self.interference = now, 0.0

    def ended(self) -> None:
        """Its sequence was released."""
        if self.name is not None:
            self.drafter.unspent += max(0.0, min(self.balance, _START) - self._start)

    def budget_sent(self, now: float, budget: int) -> None:
        """A tree was requested with this budget; 0: the next step is plain."""
        self._answered = now
        opens = budget > 0
        if opens and self.suspended:
            self.exploring = self.balance < _START
        self.suspended = not opens
        self._drafting |= opens


class Drafters:
    """Statistics by drafter name, of the names used last."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, DrafterStatistics] = OrderedDict()

    def of(self, name: str) -> DrafterStatistics:
        """Statistics of a name."""
        found = self._named.setdefault(name, DrafterStatistics())
        self._named.move_to_end(name)
        while len(self._named) > _NAMES:
            self._named.popitem(last=False)
        return found

    def to_json(self) -> dict[str, Any]:
        """Gains and budgets by name."""
        return {name: [each.gain, each.nodes] for name, each in self._named.items()}

    def load_json(self, stored: dict[str, Any]) -> None:
        """Take over those of an earlier process."""
        for name, (gain, nodes) in stored.items():
            self._named[str(name)] = DrafterStatistics(
                min(_MAX, max(_MIN, float(gain))), None if nodes is None else float(nodes)
            )
