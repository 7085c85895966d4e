"""Whether a sequence drafts: the controller.

The unit of everything here is a plain token: a token that the sequence would have been given in
plain decoding. :class:`PlainClock` turns wall-clock time into them. A drafted round goes from the
end of one step to the end of the next. It brings the emitted tokens and costs the plain tokens that
passed, whether in the draft, on the way, in a queue or in the step. The difference is its gain.

A sequence drafts while its balance is above 0. Gains change the balance; in plain decoding it rises
by a small share of the emitted tokens. So drafting that does not pay costs at most that share of
the time, and a method that seldom drafts but then gains much pays for its failed attempts itself.

A drafter has a balance too, which changes with all of its sequences: a new sequence begins with at
most that. A sequence whose drafting has ended tries again soon if the drafter pays elsewhere (its
texts have places that it knows), and late if it pays nowhere.

Where the verifier's own tree promises more than a round with a draft, none is asked for, and a
drafter that would have to read a long text first is given it only if its drafts should gain more
than that. Both compare what rounds of the drafter brought and took, in this text and others. The
rules were chosen on recorded trees.

A sequence for which several drafters draft in turn has a balance with each of them. A round counts
for the drafter whose tree was verified; to the others its tokens are plain ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.sources.ratio import worth_drafting
from paceline.tree import MAX_NODES
from paceline.verifier.scheduler.costs import FIRST_STEPS, OUTLIER, WEIGHT

_SHARE = 0.015  # of plain tokens that attempts may cost
# The same of a sequence whose drafter pays, at first, and at least: each failed attempt halves it
_SHARE_IF_PAYING, _LEAST_IF_PAYING = 0.2, 0.03
_START = 2.0  # balance of an unknown drafter, and of a new sequence at most. Unit: plain tokens
_MAX = 32.0  # maximum balance: what a change for the worse can cost. Unit: plain tokens
# Minimum balance, which bounds the time until the next attempt: the same after a round of a drafter
# that was paying, because a stall of the machine must not end drafting for long. Unit: plain tokens
_MIN, _MIN_IF_PAYING = -400.0, -1.0
_NEWEST = 0.1  # weight of the newest round in what a round brings and costs
_READ = 0.25  # weight of the newest text in what reading costs
_FORGOTTEN = 0.1  # of what a drafter takes, with each text that it is not asked for
_FEW = 32  # tokens of a text after which its own drafts tell what they gain in it
_MARGIN = 2.0  # what drafts are expected to gain in a text that is read, over the time for that
_NAMES = 64  # drafter names that are remembered; clients choose names
_STALE = 1000  # steps beside drafting at a load after which plain decoding is measured again
_MAX_EXPONENT = 100.0


@dataclass
class Account:
    """What drafting brings to a sequence, or to all sequences of a drafter."""

    balance: float = _START  # see the module. Unit: plain tokens.
    # Power of a tree's survivals at which their sum is the number of accepted nodes: the
    # temperature of DSpark 3.2.1, found online. It keeps the order of a tree's nodes.
    exponent: float = 1.0
    nodes: float = float(MAX_NODES)  # maximum number of nodes that are worth drafting
    # What a drafted round brings and takes beyond a plain one. Unit: plain tokens.
    tokens: float = 1.0
    cost: float = 0.0
    # What the other steps lose while the drafter reads a text. Unit: plain tokens for each token.
    reading: float = 0.0
    emitted: float = 0.0  # tokens of a text. Unit: tokens

    @property
    def paying(self) -> bool:
        """Whether drafting has gained in all."""
        return self.balance > _START

    def verified(self, tokens: float, passed: float) -> None:
        """Learn from a round whose tree brought tokens in the time of ``passed`` plain ones."""
        self.tokens += _NEWEST * (tokens - 1.0 - self.tokens)
        self.cost += _NEWEST * (passed - 1.0 - self.cost)

    def drafted(self, gain: float, *, paying: bool) -> None:
        """Add the gain of a drafted round, in plain tokens; ``paying``: the drafter had gained."""
        lowest = min(self.balance, _MIN_IF_PAYING if paying else _MIN)
        self.balance = min(_MAX, max(self.balance + gain, lowest))

    def decoded(self, tokens: float) -> None:
        """Add what plain decoding allows for attempts, in plain tokens."""
        if self.balance < _START:
            self.balance += tokens

    def admitted(self, drafted: int, admitted: int) -> None:
        """A tree was cut to ``admitted`` nodes: the next may have twice as many and some more."""
        nodes = worth_drafting(self.nodes, drafted, admitted, 2 * admitted + 8)
        self.nodes = min(float(MAX_NODES), nodes)

    def accepted(self, expected: float, accepted: int) -> None:
        """Correct the exponent by nodes whose survivals sum to ``expected``."""
        error = (expected - accepted) / (1.0 + expected)
        exponent = self.exponent * math.exp(0.1 * error)
        self.exponent = min(_MAX_EXPONENT, max(1 / _MAX_EXPONENT, exponent))


class SequenceState:
    """The controller's state of one sequence with one drafter."""

    def __init__(self, drafter: Account, now: float, length: int) -> None:
        """Begin with the account of the drafter, for a text of ``length`` tokens; ``now`` is the
        reading of the plain clock."""
        self.account = replace(drafter, balance=min(_START, drafter.balance))  # for this text
        self.drafting = False  # whether its round has a draft, or the round before had one
        # Net tokens that this sequence's drafting has cost the other sequences since its last
        # answer.
        self.owed = 0.0
        self.reading = False  # whether its drafter reads the text
        self._opened = False  # whether it has begun to
        self._length = length
        self._missed = 0.0  # what drafts would have gained meanwhile. Unit: plain tokens.
        self._emitted = 0  # tokens so far
        self._lost = 0.0  # what the reading has cost. Unit: plain tokens.
        self._drafter = drafter
        self._began = now
        self._suspended = True
        self._share = _SHARE_IF_PAYING

    @property
    def drafts(self) -> bool:
        return self.account.balance > 0

    @property
    def busy(self) -> bool:
        """Whether its drafter may work beside a step."""
        return self.drafting or self.reading

    def asks(self, local: float) -> bool:
        """Return whether a tree is worth its time where a local one is expected to bring ``local``
        tokens: with it (1 + tokens) / (1 + cost) tokens come in the time of one, without 1 + local.

        A drafter reads the text first. It begins if drafts are expected to gain what that costs: as
        much for each token as they would have so far, in a text as long as others or twice as long
        as it is.
        """
        account = self.account
        # Where drafts bring less than they take, the balance allows attempts without a local tree.
        if max(account.tokens, account.cost) - local < account.cost * (1.0 + local):
            return False
        if not self._opened:
            self._missed += max(_SHARE, account.tokens - account.cost)
            more = max(1.0, self._drafter.emitted / (self._emitted + _FEW))
            return self._missed * more >= _MARGIN * self._drafter.reading * self._length
        return True

    def opening(self, now: float) -> None:
        """The drafter reads the text beside the next step, which is a plain one."""
        self._opened = self.reading = True
        self._began = now

    def requested(self, now: float, budget: int) -> None:
        """A tree was requested with this budget; 0: the next step is plain."""
        self._opened |= budget > 0
        self._began = now
        if budget > 0 and self._suspended and self.account.balance < _START:
            # An attempt after a suspension counts on the drafter's own confidences: by those that
            # led to the suspension, no node would be verified and nothing learnt.
            self.account.exponent = 1.0
        self._suspended = not budget
        self.drafting |= budget > 0

    def answered(self, now: float, emitted: int, *, tree: bool) -> None:
        """A step, with a tree or without, gave it tokens at a reading of the plain clock."""
        drafter, passed = self._drafter, now - self._began + self.owed
        self._emitted += emitted
        if self.reading:
            self._read(min(passed, OUTLIER) - 1.0)
        elif self.drafting or tree:
            self._drafted(emitted - passed)
        else:
            self._decoded(emitted)
        if tree:
            for account in (self.account, drafter):
                account.verified(emitted, min(passed, OUTLIER))
        drafter.nodes, drafter.exponent = self.account.nodes, self.account.exponent
        # The round after a tree counts too: the way back to plain decoding is part of its cost.
        self.drafting, self.reading = tree, False
        self._began, self.owed = now, 0.0

    def passed_over(self, now: float, emitted: int) -> None:
        """A step gave it tokens, and had the tree of another drafter: to this one they are plain
        tokens, unless all waited for its tree, for which it pays."""
        if self.owed > 0:
            self._drafted(-self.owed)
        else:
            self._decoded(emitted)
        self.drafting = False
        self._began, self.owed = now, 0.0

    def _drafted(self, gain: float) -> None:
        drafter, before = self._drafter, self.account.balance
        paying = drafter.paying
        self._end_reading()
        self.account.drafted(gain, paying=paying)
        drafter.drafted(gain, paying=paying)
        if self.account.paying:
            self._share = _SHARE_IF_PAYING
        elif self.account.balance <= 0 < before:
            self._share = max(_LEAST_IF_PAYING, self._share / 2)

    def end(self) -> None:
        drafter = self._drafter
        drafter.emitted += _READ * (self._emitted - drafter.emitted)
        if not self._opened:  # what is not measured again may have been a disturbed machine's
            drafter.cost *= 1 - _FORGOTTEN
            drafter.reading *= 1 - _FORGOTTEN

    def _read(self, lost: float) -> None:
        """A step beside which the drafter read took longer by so many plain tokens. One may have
        been disturbed; many tell what reading costs before it ends."""
        self._lost += lost
        so_far = (self._lost - OUTLIER) / self._length
        self._drafter.reading = max(self._drafter.reading, so_far)

    def _end_reading(self) -> None:
        """The drafter has read the text, if it did."""
        if self._lost:
            cost, self._lost = max(0.0, self._lost) / self._length, 0.0
            self._drafter.reading += _READ * (cost - self._drafter.reading)

    def _decoded(self, emitted: int) -> None:
        drafter = self._drafter
        self._end_reading()
        self.account.decoded((self._share if drafter.paying else _SHARE) * emitted)
        drafter.decoded(_SHARE * emitted)


@dataclass
class _PlainSpeed:
    """Speed of plain decoding at a load."""

    ratio: float = 1.0  # measured time over predicted time
    steps: int = 0  # plain steps of this process; an earlier one may have left a ratio
    missing: int = FIRST_STEPS  # plain steps after which the ratio is known
    drafted: int = 0  # steps beside drafting since the newest plain step


class PlainClock:
    """Counts plain tokens: how many each sequence would have been given since the start.

    The cost table predicts a plain step on an idle machine. The ratio of measured to predicted
    time, from the end of one step to the end of the next, is learnt at each load (1, 2, 3 to 4, 5
    to 8, ... sequences) in steps without drafting sequences.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._speeds: dict[int, _PlainSpeed] = {}

    def known(self, load: int) -> bool:
        """Return whether plain decoding was measured. Drafting starts afterwards.

        At a load that is new, the ratio of the nearest one counts until it is due.
        """
        return self._nearest(_bucket(load)).missing <= 0

    def seconds(self, load: int, predicted: float) -> float:
        """Return the time of a step by the ratio of plain ones under this load. Unit: seconds."""
        return predicted * self._nearest(_bucket(load)).ratio

    def measured(self, load: int, predicted: float) -> float:
        """Return the time of a plain step in this process; 0 if too few ran. Unit: seconds."""
        known = self._nearest(_bucket(load)).steps >= FIRST_STEPS // 2
        return self.seconds(load, predicted) if known else 0.0

    def advance(self, load: int, seconds: float, predicted: float) -> None:
        """Let wall-clock time pass; ``predicted`` is a plain step of all ``load`` sequences."""
        self.now += seconds / self.seconds(load, predicted)

    def observe(self, load: int, seconds: float, predicted: float) -> None:
        """A step without drafting sequences took ``seconds`` from the end of the last step."""
        speed, ratio = self._at(load), seconds / predicted
        if ratio > OUTLIER * speed.ratio and speed.missing < FIRST_STEPS:
            return
        speed.steps += 1
        speed.missing -= 1
        speed.drafted = 0
        speed.ratio += max(WEIGHT, 1 / speed.steps) * (ratio - speed.ratio)

    def drafted(self, load: int) -> None:
        """Count a step with drafting sequences. After many, plain steps are measured again."""
        speed = self._at(load)
        speed.drafted += 1
        if speed.drafted >= _STALE:
            speed.drafted, speed.missing = 0, FIRST_STEPS // 2

    def _at(self, load: int) -> _PlainSpeed:
        """Return the speed of a load; a new one begins as a copy of the nearest."""
        bucket = _bucket(load)
        return self._speeds.setdefault(bucket, replace(self._nearest(bucket)))

    def _nearest(self, bucket: int) -> _PlainSpeed:
        nearest = min(self._speeds, key=lambda seen: (abs(seen - bucket), seen), default=None)
        return _PlainSpeed() if nearest is None else self._speeds[nearest]

    def to_json(self) -> dict[str, Any]:
        speeds = self._speeds.items()
        return {str(bucket): speed.ratio for bucket, speed in speeds if speed.missing <= 0}

    def load_json(self, stored: dict[str, Any]) -> None:
        """Take over ratios of an earlier process."""
        for bucket, ratio in stored.items():
            if 0.1 < float(ratio) < 100.0:
                self._speeds[int(bucket)] = _PlainSpeed(float(ratio), missing=0)


def _bucket(load: int) -> int:
    return max(0, load - 1).bit_length()


class Drafters:
    """Accounts by drafter name, of the names used last."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, Account] = OrderedDict()

    def of(self, name: str) -> Account:
        account = self._named.setdefault(name, Account())
        self._named.move_to_end(name)
        while len(self._named) > _NAMES:
            self._named.popitem(last=False)
        return account

    def to_json(self) -> dict[str, Any]:
        """Return what another process may begin with: each one measures what drafts take."""
        kept = ("balance", "exponent", "nodes", "emitted")
        named = self._named.items()
        return {name: {field: getattr(account, field) for field in kept} for name, account in named}

    def load_json(self, stored: dict[str, Any]) -> None:
        """Take over the accounts of an earlier process."""
        for name, fields in stored.items():
            account = Account(**{field: float(value) for field, value in fields.items()})
            if all(math.isfinite(value) for value in asdict(account).values()):
                self._named[str(name)] = account
