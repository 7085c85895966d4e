"""Sequential temperature scaling (DSpark, section 3.2.1) and its quality measures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.drafter.calibration import Scaling
from paceline.train.calibration.paths import Floats, Paths

_BINS = 10
_TEMPERATURES = np.geomspace(0.25, 6.0, 41)
_SHIFTS = np.linspace(-3.0, 3.0, 61)
_CLIP = 1e-6  # confidences are kept this far from 0 and 1
_MIN_PATHS = 100  # a depth with fewer paths gets no scaling of its own


def expected_error(survival: Floats, accepted: NDArray[np.bool_]) -> float:
    """Expected calibration error over 10 equally wide bins of the predicted probability."""
    bins = np.minimum((survival * _BINS).astype(int), _BINS - 1)
    predicted = np.bincount(bins, survival, _BINS)
    actual = np.bincount(bins, accepted, _BINS)
    return float(np.abs(predicted - actual).sum()) / max(1, len(survival))


def area_under_curve(survival: Floats, accepted: NDArray[np.bool_]) -> float:
    """Area under the ROC curve; NaN where all paths were accepted or none was."""
    _, ranks, ties = np.unique(survival, return_inverse=True, return_counts=True)
    middle = ties.cumsum() - (ties - 1) / 2
    good = int(accepted.sum())
    bad = len(accepted) - good
    if not good or not bad:
        return float("nan")
    return float((middle[ranks][accepted].sum() - good * (good + 1) / 2) / (good * bad))


def scale(confidences: Floats, scaling: Scaling) -> Floats:
    """Apply a :class:`~paceline.drafter.calibration.Scaling` to an array of confidences."""
    clipped = confidences.clip(_CLIP, 1 - _CLIP)
    logits = np.log(clipped / (1 - clipped)) / scaling.temperature + scaling.shift
    scaled: Floats = 1 / (1 + np.exp(-logits))
    return scaled


def fit(levels: Sequence[Paths]) -> tuple[Scaling, ...]:
    """Fit one scaling per depth, from shallow to deep.

    Each minimizes the expected calibration error of the product along the path, with the scalings
    of shallower depths fixed. Fitting stops at the first depth with fewer than 100 paths.
    """
    found: list[Scaling] = []
    for level in levels:
        if len(level.accepted) < _MIN_PATHS:
            break
        above = np.prod(
            [scale(level.confidences[:, i], each) for i, each in enumerate(found)], axis=0
        )
        candidates = [Scaling(float(t), float(s)) for t in _TEMPERATURES for s in _SHIFTS]
        last = level.confidences[:, -1]
        errors = [expected_error(above * scale(last, each), level.accepted) for each in candidates]
        # Among candidates as good as the best up to one path, take the one closest to identity.
        limit = min(errors) + 1.0 / len(level.accepted)
        good = [each for each, error in zip(candidates, errors, strict=True) if error <= limit]
        found.append(min(good, key=lambda each: abs(math.log(each.temperature)) + abs(each.shift)))
    return tuple(found)


def calibrated(levels: Sequence[Paths], scalings: Sequence[Scaling]) -> list[Paths]:
    """The same paths with scaled confidences; the last scaling also applies to deeper levels."""
    if not scalings:
        return list(levels)
    return [
        Paths(
            np.stack(
                [
                    scale(level.confidences[:, i], scalings[min(i, len(scalings) - 1)])
                    for i in range(level.confidences.shape[1])
                ],
                axis=1,
            ),
            level.accepted,
        )
        for level in levels
    ]
