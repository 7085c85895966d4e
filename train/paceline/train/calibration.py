"""Sequential temperature scaling of confidences (DSpark, section 3.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BINS = 10
_TEMPERATURES = np.geomspace(0.25, 4.0, 33)  # 1 is among them
_MIN_CHAINS = 100  # a level with fewer chains keeps its logits
_CLIP = 1e-6  # confidences are kept this far from 0 and 1


@dataclass(frozen=True)
class Chain:
    """A drafted chain of one round."""

    confidences: Sequence[float]
    """Of its tokens, from the anchor's child down, by a head without temperatures."""

    accepted: int
    """How many of them were accepted."""


def fit_temperatures(chains: Sequence[Chain], levels: int) -> tuple[float, ...]:
    """What the logits of the confidences are divided by, for each of ``levels`` levels.

    From shallow to deep, each minimises the expected calibration error of the survival at its
    level, with those above it fixed. Among temperatures as good as the best up to one chain, it is
    the one closest to 1.
    """
    found: list[float] = []
    for level in range(levels):
        reaching = [each for each in chains if len(each.confidences) > level]
        if len(reaching) < _MIN_CHAINS:
            break
        confidences = np.array([each.confidences[: level + 1] for each in reaching])
        accepted = np.array([each.accepted > level for each in reaching])
        errors = np.array(
            [
                calibration_error(_survival(confidences, [*found, temperature]), accepted)
                for temperature in _TEMPERATURES
            ]
        )
        good = _TEMPERATURES[errors <= errors.min() + 1 / len(reaching)]
        found.append(round(float(good[np.abs(np.log(good)).argmin()]), 4))
    return tuple(found) + (1.0,) * (levels - len(found))


def calibration_error(survival: NDArray[np.float64], accepted: NDArray[np.bool_]) -> float:
    """Expected calibration error over 10 equally wide bins of the predicted probability."""
    bins = np.minimum((survival * _BINS).astype(int), _BINS - 1)
    predicted = np.bincount(bins, survival, _BINS)
    actual = np.bincount(bins, accepted, _BINS)
    return float(np.abs(predicted - actual).sum()) / max(1, len(survival))


def _survival(
    confidences: NDArray[np.float64], temperatures: Sequence[float]
) -> NDArray[np.float64]:
    """Predicted probability that each chain is accepted as a whole, ``[n]``."""
    clipped = confidences.clip(_CLIP, 1 - _CLIP)
    logits = np.log(clipped / (1 - clipped)) / np.array(temperatures)
    survival: NDArray[np.float64] = (1 / (1 + np.exp(-logits))).prod(axis=1)
    return survival
