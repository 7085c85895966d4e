"""Sequential temperature scaling, and what it is judged by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.bench.calibration.samples import Floats, Paths
from paceline.drafter.calibration import Scaling

BINS = 10
_TEMPERATURES = np.geomspace(0.25, 6.0, 41)
_SHIFTS = np.linspace(-3.0, 3.0, 61)
_LEAST = 1e-6
_FEWEST = 100  # paths of a depth by which it gets a scaling of its own


@dataclass(frozen=True)
class Bin:
    """Paths that were given about the same chance."""

    count: int
    predicted: float
    found: float


def reliability(survival: Floats, stood: NDArray[np.bool_]) -> list[Bin]:
    """Equally wide bins of the predicted chance; empty ones are left out."""
    where = np.minimum((survival * BINS).astype(int), BINS - 1)
    count = np.bincount(where, minlength=BINS)
    predicted = np.bincount(where, survival, BINS)
    found = np.bincount(where, stood, BINS)
    return [
        Bin(int(n), float(p / n), float(f / n))
        for n, p, f in zip(count, predicted, found, strict=True)
        if n
    ]


def expected_error(survival: Floats, stood: NDArray[np.bool_]) -> float:
    """Expected calibration error: mean distance of chance and outcome over bins, by their size."""
    bins = reliability(survival, stood)
    return sum(b.count * abs(b.predicted - b.found) for b in bins) / max(1, len(survival))


def area_under_curve(survival: Floats, stood: NDArray[np.bool_]) -> float:
    """Chance that of two paths, one that stood and one that did not, the first was given more."""
    _, ranks, ties = np.unique(survival, return_inverse=True, return_counts=True)
    middle = ties.cumsum() - (ties - 1) / 2
    good = int(stood.sum())
    bad = len(stood) - good
    if not good or not bad:
        return float("nan")
    return float((middle[ranks][stood].sum() - good * (good + 1) / 2) / (good * bad))


def scale(confidences: Floats, scaling: Scaling) -> Floats:
    """A :class:`~paceline.drafter.calibration.Scaling` of many confidences."""
    sure = confidences.clip(_LEAST, 1 - _LEAST)
    logits = np.log(sure / (1 - sure)) / scaling.temperature + scaling.shift
    scaled: Floats = 1 / (1 + np.exp(-logits))
    return scaled


def fit(levels: Sequence[Paths], *, shifts: bool = True) -> tuple[Scaling, ...]:
    """Scalings by depth, from left to right: each makes the error of the product least, with those
    before it fixed (DSpark, section 3.2.1). `shifts=False` looks for temperatures alone."""
    found: list[Scaling] = []
    for level in levels:
        if len(level.stood) < _FEWEST:
            break
        before = np.prod(
            [scale(level.confidences[:, i], each) for i, each in enumerate(found)], axis=0
        )
        candidates = [
            Scaling(float(temperature), float(shift))
            for temperature in _TEMPERATURES
            for shift in (_SHIFTS if shifts else (0.0,))
        ]
        last = level.confidences[:, -1]
        errors = [expected_error(before * scale(last, each), level.stood) for each in candidates]
        # Of those as good as the best within its own noise, the one that changes least.
        bar = min(errors) + 1.0 / len(level.stood)
        good = [each for each, error in zip(candidates, errors, strict=True) if error <= bar]
        found.append(min(good, key=_change))
    return tuple(found)


def _change(scaling: Scaling) -> float:
    return abs(math.log(scaling.temperature)) + abs(scaling.shift)


def calibrated(levels: Sequence[Paths], scalings: Sequence[Scaling]) -> list[Paths]:
    """The same paths with scaled confidences; the last scaling holds for deeper ones."""
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
            level.stood,
        )
        for level in levels
    ]
