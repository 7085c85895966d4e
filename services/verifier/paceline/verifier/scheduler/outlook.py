"""Whether drafting pays for one sequence, and how much of it."""

from __future__ import annotations

from paceline.verifier.scheduler.experience import Experience, Means
from paceline.verifier.scheduler.trust import Trust

_FIRST_PROBE, _LAST_PROBE = 8, 1024  # tokens between probes: the least and the most
_PATIENCE = 2  # rounds that one who tries again may ask in vain: not every place can be drafted for
# Tokens that asks have to bring beyond their price: of gains that are 0 in truth, every other one
# looks like more.
_MARGIN = 0.25
_SHRINKING = 8  # part that a budget shrinks by at most, after a tree
_GROWTH = 8  # nodes that a budget grows by at least, where all that was sent was admitted


class Outlook:
    """What the scheduler knows of one sequence.

    Attributes:
        experience: What is shared by its drafter's name.
        trust: How far its confidences are to be believed.
        drafts: Whether somebody drafts for it.
        seen: When it was served, or began to wait for a step (time.perf_counter).
        open: Whether its last answer let it draft.
        drafting: Whether what happens from its last answer to the next is drafting's doing.
        toll: What the others lost since then, as far as it is to blame. Unit: tokens.
        waits: Whether it was let draft, and there is nothing to judge that by yet.
        budget: What it may draft, as decided last; None: never yet.
    """

    def __init__(self, experience: Experience, most: int, *, drafts: bool) -> None:
        self.experience = experience
        self.trust = Trust(experience.trust)
        self.drafts = drafts
        self.seen = 0.0
        self.open = False
        self.drafting = False
        self.toll = 0.0
        self.waits = False
        self.budget: int | None = None
        self._answered: float | None = None
        self._told_under = 1
        self._means = Means(experience.means)
        self._most = most
        self._nodes = experience.nodes or most
        self._resting = self._probe_after = _FIRST_PROBE
        self._tries = 0
        self._trial = False  # whether it was let draft although that did not pay so far
        self._since = 1  # tokens since a drafted one stood, or since it began
        self._balance = 0.0  # what its rounds gained so far
        self._losing = False
        # Of the last ask after silence: how things stood, and what came of it.
        self._asked_since, self._asked_losing = 1, False
        self._gained = 0.0

    @property
    def nodes(self) -> int:
        """Most nodes to draft next, if any at all."""
        return min(self._nodes, self._most)

    def checked(self, drafted: int, admitted: int) -> None:
        """A tree was cut to ``admitted`` of its ``drafted`` nodes.

        The next one may be somewhat larger, so that it is seen when more would pay again. A tree
        of which little is worth checking says little about the next: it shrinks step by step.
        """
        if admitted == drafted:
            self._nodes = min(self._most, max(self._nodes, 2 * drafted, drafted + _GROWTH))
        else:
            worth = admitted + max(2, admitted // 2)
            self._nodes = min(self._most, max(worth, self._nodes - self._nodes // _SHRINKING - 1))
        self.experience.nodes = self._nodes

    def answered(self, load: int, emitted: int, clock: float, *, tree: bool) -> None:
        """A step served it.

        Args:
            load: Sequences alive.
            emitted: Tokens it got.
            clock: Tokens that plain steps would have given it since the scheduler began.
            tree: Whether it had sent a tree.
        """
        self.drafts |= tree
        stood = tree and emitted > 1
        if self._answered is not None and (tree or self.drafting):
            self._settle(load, emitted, clock - self._answered, tree=tree, stood=stood)
        self._since = 0 if stood else self._since + emitted
        self._resting += emitted
        self._answered, self.toll = clock, 0.0
        # The way back from a tree to a free run is part of what the tree cost.
        self.drafting = tree

    def told(self, load: int, budget: int, clock: float) -> None:
        """Its client was answered under some load, and told how much to draft."""
        self._answered, self._told_under = clock, load
        opens = self.drafts and budget > 0
        self._trial = opens and not self.pays(load)
        if opens and not self.open:
            self._tries, self.waits = 0, False
        self.open = opens
        self.drafting |= opens
        if opens:
            self._resting = 0

    def pays(self, load: int) -> bool:
        """Whether rounds bring what they cost; not before that is known."""
        gain = self._means.gain(load)
        if self._since:
            asked = self.experience.asks.gain(load, self._since, losing=self._losing)
            gain = gain if asked is None else asked - _MARGIN
        return gain is not None and gain >= (self.experience.tolls.at(load) or 0.0)

    def ended(self) -> None:
        """The sequence is gone: nothing more will come of what it asked last."""
        if not self._since:
            self._learn_ask(self._told_under)

    @property
    def probe_due(self) -> bool:
        """Whether it rested long enough to try again."""
        return self._resting >= self._probe_after

    def _settle(self, load: int, emitted: int, price: float, *, tree: bool, stood: bool) -> None:
        """Book what a drafted round brought and cost, to the sequence and to the others."""
        # The account that let it draft pays: loads come and go between levels.
        account = self.experience.account(self._told_under)
        account.settle((emitted - price - self.toll) / load, trial=self._trial)
        self._tries += 1
        self.waits = self.open and not tree and self._tries < _PATIENCE
        # At first there may be no tree because the drafter is still being attached.
        if not self.open or (self._tries == 1 and not tree):
            return
        if tree:
            probe = not self.pays(load)
            self._means.learn(load, emitted, price, probe=probe)
            self.experience.means.learn(load, emitted, price)
        self._book(load, emitted - price, stood=stood)
        self.experience.tolls.learn(load, self.toll)
        if self.pays(load):
            self._probe_after = _FIRST_PROBE
        else:
            self._probe_after = min(2 * self._probe_after, _LAST_PROBE)

    def _book(self, load: int, gain: float, *, stood: bool) -> None:
        """Add a round to what came of the last ask after silence, or of this one."""
        if self._since:
            self._asked_since, self._asked_losing, self._gained = self._since, self._losing, 0.0
        self._gained += gain
        self._balance += gain
        if not stood:
            self._learn_ask(load)
            self._losing = self._balance < 0

    def _learn_ask(self, load: int) -> None:
        """Nothing more comes of the last ask."""
        asks = self.experience.asks
        asks.learn(load, self._asked_since, self._gained, losing=self._asked_losing)
