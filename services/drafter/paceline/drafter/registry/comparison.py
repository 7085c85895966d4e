"""Compares mean values per round of two versions: Welch's t test on ratio estimators.

Rounds of one generation are correlated, generations are not, so the generation is the sampling
unit. A mean per round is a ratio of two sums over generations; its variance is that of the ratio
estimator of cluster sampling (Cochran, Sampling Techniques, section 6.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Mean:
    """An estimated mean."""

    value: float
    variance: float
    """Of the estimate, not of single values."""

    freedom: int
    """Degrees of freedom of the variance."""


def mean_per_round(sums: Sequence[float], rounds: Sequence[int]) -> Mean:
    """Mean of a quantity per round over generations.

    Args:
        sums: Sum of the quantity over each generation's rounds; at least two generations.
        rounds: Number of rounds of each generation, at least one.
    """
    count, total = len(sums), sum(rounds)
    mean = sum(sums) / total
    residuals = sum((s - mean * n) ** 2 for s, n in zip(sums, rounds, strict=True))
    return Mean(mean, residuals * count / (count - 1) / total**2, count - 1)


def difference_bounds(
    canary: Mean, baseline: Mean, factor: float, error: float
) -> tuple[float, float]:
    """Lower and upper confidence bound of ``canary - factor * baseline``.

    The probability that the true difference is below the lower bound is about ``error``; so is the
    probability that it is above the upper bound.
    """
    difference = canary.value - factor * baseline.value
    parts = (canary.variance, factor**2 * baseline.variance)
    variance = sum(parts)
    if variance == 0.0:
        return difference, difference
    share = parts[0] / variance
    # Welch-Satterthwaite degrees of freedom.
    freedom = 1.0 / (share**2 / canary.freedom + (1.0 - share) ** 2 / baseline.freedom)
    reach = student_quantile(error, max(1, math.floor(freedom))) * math.sqrt(variance)
    return difference - reach, difference + reach


def student_quantile(error: float, freedom: int) -> float:
    """The value that Student's t exceeds with probability ``error``.

    Args:
        error: In (0, 0.5].
        freedom: Degrees of freedom, at least 1.
    """
    if freedom > 1000:
        return NormalDist().inv_cdf(1.0 - error)
    low, high = 0.0, 1.0
    while _student_tail(high, freedom) > error:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _student_tail(middle, freedom) > error:
            low = middle
        else:
            high = middle
    return high


def _student_tail(t: float, freedom: int) -> float:
    """Probability that Student's t exceeds ``t >= 0`` (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    series = 0.0
    for k in range(odd, freedom - 1, 2):
        series += term
        term *= cosine2 * (k + 1) / (k + 2)
    within = series * math.sin(angle)
    if odd:
        within = 2.0 / math.pi * (angle + within)
    return (1.0 - within) / 2
