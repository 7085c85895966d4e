"""Admission: the drafted nodes that a step verifies (DSpark 3.2.2 and 5.2).

A step without drafted nodes emits one token per sequence. Each node adds its survival, the
probability that it is accepted, to the expected number of tokens, and its cost to the time of the
step. Survival never rises along a path, so the nodes of all trees are sorted by survival, and each
cut of that list leaves valid trees. The search finds the cut with the most tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to do without any drafted node.

    Attributes:
        tokens: Batch tokens: one anchor per sequence, and pieces of prompts.
        attended: KV tokens that they attend to, summed over them.
        emitted: Tokens it emits, one per sequence.
    """

    tokens: int
    attended: int
    emitted: int


def admit(
    survivals: Sequence[Sequence[float]],
    emitted: int,
    seconds: Iterator[float],
    *,
    causal: bool = False,
) -> list[int]:
    """Choose how many of the likeliest nodes of several trees to verify.

    It runs once a step, between two steps that have emptied the caches: plain Python for a few
    nodes is faster than arrays.

    Args:
        survivals: For each tree the survival of its nodes, falling, parents before their children.
        emitted: Tokens that the step emits without any node.
        seconds: Time of the step with 0, 1, 2, ... nodes.
        causal: Stop where the throughput first fails to rise, as Algorithm 1 does. Then no decision
            on a node depends on it or on what was drafted after it, which rejection sampling needs
            to stay exact (appendix A). Without it all cuts are compared: exact for the
            drafter-invariant contract only, and better where costs are jagged.

    Returns:
        For each tree the number of its first nodes to verify.
    """
    nodes = [(-each, owner) for owner, tree in enumerate(survivals) for each in tree]
    nodes.sort(key=lambda node: node[0])  # stable: of equal nodes, parents first
    expected, cut = float(emitted), 0
    best = expected / next(seconds)
    for count, (negated, _) in enumerate(nodes, 1):
        expected -= negated
        rate = expected / next(seconds)
        if rate > best:
            best, cut = rate, count
        elif causal:
            break
    counts = [0] * len(survivals)
    for _, owner in nodes[:cut]:
        counts[owner] += 1
    return counts


# Candidates. An overconfident drafter needs more than 1: the largest turns 0.98 into 0.16.
_EXPONENTS = tuple(math.exp2(half / 2) for half in range(-6, 14))
_DECAY = 0.95  # of the evidence, each round: about 20 rounds count
_SEED_ROUNDS = 4.0  # rounds that the evidence of earlier sequences counts for


def expected_nodes(survivals: Sequence[float]) -> list[float]:
    """Expected number of accepted nodes of a round by each candidate exponent."""
    return [sum([each**exponent for each in survivals]) for exponent in _EXPONENTS]


class OnlineCalibration:
    """Corrects the survivals of a drafter by an exponent that is fitted online.

    The verifier does not know how good a drafter's confidences are. It fits the exponent with which
    the survivals of the verified nodes sum to the number of accepted nodes: the temperature of
    DSpark 3.2.1, found online. An exponent keeps the order of a tree's nodes.
    """

    def __init__(self, seed: OnlineCalibration | None = None) -> None:
        """Start without evidence, or with that of ``seed``, weighted as a few rounds."""
        self._expected = [0.0] * len(_EXPONENTS)
        self._accepted = 0.0
        self._rounds = 0.0
        if seed is not None and seed._rounds:
            share = min(1.0, _SEED_ROUNDS / seed._rounds)
            self._expected = [share * each for each in seed._expected]
            self._accepted = share * seed._accepted
            self._rounds = share * seed._rounds

    def observe(self, expected: Sequence[float], accepted: int) -> None:
        """Add a round.

        Args:
            expected: :func:`expected_nodes` of the survivals of the verified nodes, as drafted.
            accepted: Number of them that were accepted.
        """
        pairs = zip(self._expected, expected, strict=True)
        self._expected = [_DECAY * before + each for before, each in pairs]
        self._accepted = _DECAY * self._accepted + accepted
        self._rounds = _DECAY * self._rounds + 1.0

    @property
    def exponent(self) -> float:
        """The exponent to apply to survivals; 1 without evidence."""
        if not self._rounds:
            return 1.0
        above = self._expected[0]
        for index, below in enumerate(self._expected):  # they fall as the exponent rises
            if below <= self._accepted:
                part = (above - self._accepted) / (above - below) if above > below else 1.0
                return _EXPONENTS[max(0, index - 1)] * math.exp2(min(index, part) / 2)
            above = below
        return _EXPONENTS[-1]
