"""Admission: the drafted nodes that a step verifies (DSpark 3.2.2 and 5.2).

A step without drafted nodes emits one token per sequence. Each node adds its survival, the
probability that it is accepted, to the expected number of tokens, and its cost to the time of the
step. Survival never rises along a path, so the nodes of all trees are sorted by survival, and each
cut of that list leaves valid trees. The search finds the cut with the most tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Step:
    """A step without any drafted node.

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
_EXPONENTS: NDArray[np.float64] = 2.0 ** np.arange(-3.0, 7.0, 0.5)
_MIN_SURVIVAL = 1e-30  # has a finite logarithm
_DECAY = 0.95  # of the evidence, each round: about 20 rounds count
_SEED_ROUNDS = 4.0  # rounds that the evidence of earlier sequences counts for


class Calibration:
    """Corrects the survivals of a drafter by an exponent that is fitted online.

    The verifier does not know how good a drafter's confidences are. It fits the exponent with which
    the survivals of the verified nodes sum to the number of accepted nodes: the temperature of
    DSpark 3.2.1, found online. An exponent keeps the order of a tree's nodes.

    Attributes:
        exponent: To apply to survivals.
    """

    def __init__(self, seed: Calibration | None = None) -> None:
        """Start without evidence, or with that of ``seed``, weighted as a few rounds."""
        self._expected: NDArray[np.float64] = np.zeros(len(_EXPONENTS))
        self._accepted = 0.0
        self._rounds = 0.0
        self.exponent = 1.0
        if seed is not None and seed._rounds:
            share = min(1.0, _SEED_ROUNDS / seed._rounds)
            self._expected = seed._expected * share
            self._accepted = seed._accepted * share
            self._rounds = seed._rounds * share
            self.exponent = seed.exponent

    def observe(self, survivals: Sequence[float], accepted: int) -> None:
        """Add a round.

        Args:
            survivals: Survivals of the verified nodes, as drafted, in [0, 1).
            accepted: Number of them that were accepted.
        """
        logs = np.log(np.maximum(survivals, _MIN_SURVIVAL))
        self._expected = _DECAY * self._expected + np.exp(np.outer(_EXPONENTS, logs)).sum(1)
        self._accepted = _DECAY * self._accepted + accepted
        self._rounds = _DECAY * self._rounds + 1.0
        # The drafter's own exponent, 1, counts as one round. Expected nodes fall as it rises.
        prior = float(self._expected[_EXPONENTS == 1.0][0]) / self._rounds
        wanted = np.interp(-self._accepted - prior, -self._expected - prior, np.log(_EXPONENTS))
        self.exponent = float(np.exp(wanted))
