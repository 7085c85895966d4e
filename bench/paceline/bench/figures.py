"""Means over texts, and how far they can be trusted."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Rounds = Sequence[int]
"""Drafted tokens that stood in each round of one text."""

_RESAMPLES = 2000


def accepted_length(texts: Sequence[Rounds]) -> dict[str, Any]:
    """Accepted length over all rounds of some texts, as JSON-ready figures; empty without rounds.

    `interval_95` is a bootstrap over texts, because rounds of one text are alike. `by_position[d]`
    is the share of rounds whose drafted token at depth d + 1 stood.
    """
    counts = [(sum(rounds), len(rounds)) for rounds in texts if rounds]
    if not counts:
        return {}
    accepted, rounds = np.array(counts, dtype=np.float64).T
    picks = np.random.default_rng(0).integers(len(counts), size=(_RESAMPLES, len(counts)))
    means = 1 + accepted[picks].sum(1) / rounds[picks].sum(1)
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
