"""Temperatures of confidences, fitted to how often drafted tokens are accepted."""

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.train.calibration import Chain, fit_temperatures


def chains(temperatures: Sequence[float], count: int, seed: int = 1) -> list[Chain]:
    """Chains whose tokens are accepted with the probability of their logits over temperatures."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0.5, 2, (count, len(temperatures)))
    accepted = draw.random(logits.shape) < 1 / (1 + np.exp(-logits / temperatures))
    confidences = 1 / (1 + np.exp(-logits))
    return [
        Chain(tuple(row), int(right.cumprod().sum()))
        for row, right in zip(confidences.tolist(), accepted, strict=True)
    ]


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (2.0, 0.5), (0.5, 3.0)])
def test_the_temperatures_that_made_confidences_wrong_are_found(
    temperatures: tuple[float, ...],
) -> None:
    found = fit_temperatures(chains(temperatures, 6000), 2)
    assert found == pytest.approx(temperatures, rel=0.15)


def test_levels_with_few_chains_keep_their_logits() -> None:
    many = chains((3.0,), 500)
    few = chains((3.0, 3.0), 50, seed=2)
    assert fit_temperatures([*many, *few], 3)[1:] == (1.0, 1.0)
    assert fit_temperatures([*many, *few], 3)[0] > 1.5
    assert fit_temperatures(few, 2) == (1.0, 1.0)
    assert fit_temperatures([], 2) == (1.0, 1.0)
