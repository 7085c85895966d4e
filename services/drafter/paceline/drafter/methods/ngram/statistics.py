"""How often matches continued."""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_WEIGHT = 8.0
"""Weight of the prior, as a number of observations."""


def step_confidence(match: int) -> float:
    """Prior probability that a match of ``match`` tokens continues: ``match / (match + 1)``.

    This is the rule of succession, not a measurement. Its product over a path telescopes: a match
    of n tokens continues for k more with probability n / (n + k). So a longer match drafts a longer
    continuation.
    """
    return match / (match + 1)


class MatchStatistics:
    """How often matches of each length continued, in one text or in all texts of an owner.

    Texts differ in repetitiveness more than match lengths show, and so do owners. The prior of a
    text are its owner's texts, and that of an owner is :func:`step_confidence`.
    """

    def __init__(self, longest: int, prior: MatchStatistics | None = None) -> None:
        """Of matches measured up to ``longest``; what is observed is observed in ``prior`` too."""
        self._groups = [_group(length) for length in range(longest + 1)]
        self._correct = [0] * (self._groups[-1] + 1)
        self._total = [0] * (self._groups[-1] + 1)
        self._prior = prior

    def observe(self, match: int, predicted: Sequence[int], tokens: Sequence[int]) -> None:
        """Compares the continuation of a match of ``match`` tokens with the text's."""
        for length, (expected, token) in enumerate(zip(predicted, tokens, strict=False), match):
            self._count(length, correct=expected == token)
            if expected != token:
                return

    def confidence(self, match: int) -> float:
        """Returns the probability that a match of ``match`` tokens continues for one more."""
        prior = step_confidence(match) if self._prior is None else self._prior.confidence(match)
        group = self._groups[min(match, len(self._groups) - 1)]
        return (self._correct[group] + _PRIOR_WEIGHT * prior) / (self._total[group] + _PRIOR_WEIGHT)

    def _count(self, match: int, *, correct: bool) -> None:
        group = self._groups[min(match, len(self._groups) - 1)]
        self._correct[group] += correct
        self._total[group] += 1
        if self._prior is not None:
            self._prior._count(match, correct=correct)


def _group(length: int) -> int:
    """Group of lengths that share their counts: each up to 4, then 5 to 8, 9 to 16, ..."""
    return length if length <= 4 else 2 + (length - 1).bit_length()
