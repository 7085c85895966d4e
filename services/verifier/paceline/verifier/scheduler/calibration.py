"""Confidence calibration, fitted online.

The verifier does not know which drafter made a tree, nor whether its confidences are calibrated.
It fits one exponent a sequence: the one with which the survivals of the checked nodes sum to the
number of accepted nodes. That is the temperature of DSpark 3.2.1, found online. An exponent keeps
the order of a tree's nodes, so trees stay sorted by survival.
"""

from __future__ import annotations

import numpy as np

from paceline.verifier.scheduler.admission import Floats

# Candidates. An overconfident drafter needs more than 1: the largest turns 0.98 into 0.16.
_EXPONENTS: Floats = 2.0 ** np.arange(-3.0, 7.0, 0.5)
_LEAST = 1e-30  # survival with a finite logarithm
_DECAY = 0.95  # of the evidence, each round: about 20 rounds count
_SEED_ROUNDS = 4.0  # rounds that the evidence of earlier sequences counts for


class Calibration:
    """Expected and accepted nodes of recent rounds, for each candidate exponent."""

    def __init__(self, seed: Calibration | None = None) -> None:
        """Start without evidence, or with that of ``seed``, weighted as a few rounds."""
        self._expected: Floats = np.zeros(len(_EXPONENTS))
        self._accepted = 0.0
        self._rounds = 0.0
        if seed is not None and seed._rounds:
            share = min(1.0, _SEED_ROUNDS / seed._rounds)
            self._expected = seed._expected * share
            self._accepted = seed._accepted * share
            self._rounds = seed._rounds * share

    def observe(self, survivals: Floats, accepted: int) -> None:
        """Add a round.

        Args:
            survivals: Survivals of the checked nodes, as drafted, in [0, 1): ``[nodes]``.
            accepted: Number of them that were accepted.
        """
        logs = np.log(np.maximum(survivals, _LEAST))
        self._expected = _DECAY * self._expected + np.exp(np.outer(_EXPONENTS, logs)).sum(1)
        self._accepted = _DECAY * self._accepted + accepted
        self._rounds = _DECAY * self._rounds + 1.0

    @property
    def exponent(self) -> float:
        """The exponent to apply to survivals. The drafter's own, 1, counts as one round."""
        if not self._rounds:
            return 1.0
        prior = float(self._expected[_EXPONENTS == 1.0][0]) / self._rounds
        # Expected nodes fall as the exponent rises.
        return float(
            np.exp(np.interp(-self._accepted - prior, -self._expected - prior, np.log(_EXPONENTS)))
        )
