"""Is one mean per round better than another? Pure statistics, for trials of drafter versions.

Rounds of one generation resemble each other (an easy text is easy throughout), generations do not:
so the generation is the unit that counts. A mean per round is a ratio of two sums over generations,
its variance comes from the generations' residuals (the ratio estimator of cluster sampling,
Cochran, Sampling Techniques, section 6.3), and two such means are compared by Welch's t test.
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
    """The mean of a figure per round, over generations.

    Args:
        sums: Sum of the figure over each generation's rounds.
        rounds: Rounds of each generation, at least one. Two generations or more.
    """
    count, total = len(sums), sum(rounds)
    mean = sum(sums) / total
    residuals = sum((s - mean * n) ** 2 for s, n in zip(sums, rounds, strict=True))
    return Mean(mean, residuals * count / (count - 1) / total**2, count - 1)


def difference_bounds(
    candidate: Mean, baseline: Mean, factor: float, error: float
) -> tuple[float, float]:
    """Bounds of ``candidate - factor * baseline``.

    Each is wrong with a chance of about ``error``: that the true difference lies below the lower
    one, and that it lies above the upper one.
    """
    difference = candidate.value - factor * baseline.value
    parts = (candidate.variance, factor**2 * baseline.variance)
    variance = sum(parts)
    if variance == 0.0:
        return difference, difference
    # Welch and Satterthwaite.
    share = parts[0] / variance
    freedom = 1.0 / (share**2 / candidate.freedom + (1.0 - share) ** 2 / baseline.freedom)
    reach = student_quantile(error, max(1, math.floor(freedom))) * math.sqrt(variance)
    return difference - reach, difference + reach


def student_quantile(error: float, freedom: int) -> float:
    """What Student's t exceeds with a chance of ``error``.

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
    """The chance that Student's t exceeds ``t >= 0`` (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
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
