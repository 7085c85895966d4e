"""How far confidences are to be believed, learnt from what became of the trees that carried them.

The verifier does not know who drafts, nor whether confidences were calibrated, nor whether a
drafter was swapped. So it measures: for each sequence, the exponent that would have made the sum of
the survivals it admitted equal the number of tokens it accepted. That is a temperature, as in
sequential temperature scaling (DSpark 3.2.1), but one, found online. It keeps the order of a
tree's nodes, so trees stay sorted by survival. Nothing learnt here can change a token.
"""

from __future__ import annotations

import numpy as np

from paceline.verifier.scheduler.admission import Floats

# An overconfident drafter needs an exponent above 1. With the highest, a survival of 0.98 is 0.08.
_EXPONENTS: Floats = 2.0 ** np.arange(-3.0, 7.5, 0.5)
_LEAST = 1e-30  # survival with a finite logarithm
_MEMORY = 0.95  # weight that evidence keeps with each round: about 20 rounds count
_PRIOR = 4.0  # rounds that what other sequences showed counts for


class Trust:
    """Believed and accepted tokens of late, for each exponent that might be right."""

    def __init__(self, like: Trust | None = None) -> None:
        """Know nothing; or begin with what ``like`` knows, as weakly as a few rounds of its."""
        self._believed = np.zeros(len(_EXPONENTS))
        self._accepted = 0.0
        self._rounds = 0.0
        self._exponent: float | None = None
        if like is not None and like._rounds:
            share = min(1.0, _PRIOR / like._rounds)
            self._believed = like._believed * share
            self._accepted = like._accepted * share
            self._rounds = like._rounds * share

    def learn(self, survivals: Floats, accepted: int) -> None:
        """A round is over.

        Args:
            survivals: Of the nodes that were admitted, as the drafter told, in [0, 1).
            accepted: How many of them stood.
        """
        logs = np.log(np.maximum(survivals, _LEAST))
        believed = np.exp(np.outer(_EXPONENTS, logs)).sum(1)
        self._believed = _MEMORY * self._believed + believed
        self._accepted = _MEMORY * self._accepted + accepted
        self._rounds = _MEMORY * self._rounds + 1.0
        self._exponent = None

    @property
    def exponent(self) -> float:
        """What to raise survivals to, so that they come true."""
        if self._exponent is None:
            self._exponent = self._fit()
        return self._exponent

    def _fit(self) -> float:
        """The exponent whose beliefs came true; 1, as told, is worth a round of evidence."""
        if not self._rounds:
            return 1.0
        per_round = float(self._believed[_EXPONENTS == 1.0][0]) / self._rounds
        # What is believed falls as the exponent rises.
        wanted = self._accepted + per_round
        believed = self._believed + per_round
        return float(np.exp(np.interp(-wanted, -believed, np.log(_EXPONENTS))))
