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
    reach = student_quantile(error, freedom) * math.sqrt(variance)
    return difference - reach, difference + reach


def student_quantile(error: float, freedom: float) -> float:
    """The value that Student's t exceeds with probability ``error`` (Abramowitz and Stegun 26.7.5).

    Args:
        error: In (0, 0.5]. The result is within 1% from 1e-5 on.
        freedom: Degrees of freedom, at least 7: with fewer the series converges too slowly.
    """
    x = NormalDist().inv_cdf(1.0 - error)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))
