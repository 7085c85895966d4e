"""Means over texts, and how far they can be trusted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rounds = Sequence[int]
"""Drafted tokens that stood in each round of one text."""

_RESAMPLES = 2000


def accepted_length(texts: Sequence[Rounds]) -> dict[str, Any]:
    """Accepted length over all rounds of some texts, as JSON-ready figures; empty without rounds.

    `interval_95` is a bootstrap over texts, because rounds of one text are alike. `by_position[d]`
    is the share of rounds whose drafted token at depth d + 1 stood.
    """
    counts = _counts(texts)
    if not len(counts):
        return {}
    means = 1 + _resampled(counts)
    every = np.concatenate([np.asarray(text) for text in texts if text])
    mean = float(every.mean())
    return {
        "texts": len(counts),
        "rounds": len(every),
        "accepted_length": 1 + mean,
        "accepted_length_without_bonus": mean,
        "interval_95": [float(bound) for bound in np.percentile(means, (2.5, 97.5))],
        "by_position": [float((every > depth).mean()) for depth in range(int(every.max()))],
    }


def gain(before: Sequence[Rounds], after: Sequence[Rounds]) -> dict[str, Any]:
    """What the accepted length of one drafter is beyond that of another on the same texts.

    `interval_95` is a bootstrap over texts, of both together: what is hard to draft for is so for
    both, and drops out.
    """
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one and other]
    old, new = (_counts([pair[side] for pair in pairs]) for side in (0, 1))
    (first, many), (second, more) = old.sum(0), new.sum(0)
    bounds = np.percentile(_resampled(new) - _resampled(old), (2.5, 97.5))
    return {
        "gain": float(second / more - first / many),
        "interval_95": [float(bound) for bound in bounds],
    }


def _counts(texts: Sequence[Rounds]) -> NDArray[np.float64]:
    """Drafted tokens that stood, and rounds, of each text that has any: ``[texts, 2]``."""
    return np.array([(sum(rounds), len(rounds)) for rounds in texts if rounds], dtype=np.float64)


def _resampled(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Drafted tokens that stood a round, in so many draws of as many texts."""
    picks = np.random.default_rng(0).integers(len(counts), size=(_RESAMPLES, len(counts)))
    accepted, rounds = counts[picks].sum(1).T
    resampled: NDArray[np.float64] = accepted / rounds
    return resampled
