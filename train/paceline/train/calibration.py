"""Sequential temperature scaling of confidences (DSpark, section 3.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TEMPERATURES = np.geomspace(0.25, 4.0, 33)  # 1 is among them
_MIN_CHAINS = 100  # a level with fewer chains keeps its logits
_CLIP = 1e-6  # confidences are kept this far from 0 and 1


@dataclass(frozen=True)
class Chain:
    """A drafted chain of one round."""

    # Of its tokens, from the anchor's child down, by a head without temperatures.
    confidences: Sequence[float]
    accepted: int  # how many of them were accepted


def fit_temperatures(chains: Sequence[Chain], levels: int) -> tuple[float, ...]:
    """Return the divisor of the logits of the confidences for each of ``levels`` levels.

    From shallow to deep, each minimises the log loss of the survival at its level, with those above
    it fixed. The paper minimises the expected calibration error, which is as small for a
    temperature that makes all confidences nearly equal.
    """
    temperatures: list[float] = []
    for level in range(levels):
        reaching = [chain for chain in chains if len(chain.confidences) > level]
        if len(reaching) < _MIN_CHAINS:
            break
        confidences = np.array([chain.confidences[: level + 1] for chain in reaching])
        accepted = np.array([chain.accepted > level for chain in reaching])
        losses = [
            _log_loss(_survival(confidences, [*temperatures, temperature]), accepted)
            for temperature in _TEMPERATURES
        ]
        temperatures.append(round(float(_TEMPERATURES[np.argmin(losses)]), 4))
    return tuple(temperatures) + (1.0,) * (levels - len(temperatures))


def _log_loss(survival: NDArray[np.float64], accepted: NDArray[np.bool_]) -> float:
    """Mean negative log likelihood of what was accepted."""
    return float(-np.log(np.where(accepted, survival, 1 - survival).clip(_CLIP)).mean())


def _survival(
    confidences: NDArray[np.float64], temperatures: Sequence[float]
) -> NDArray[np.float64]:
    """Return the predicted probability that each chain is accepted as a whole, ``[n]``."""
    clipped = confidences.clip(_CLIP, 1 - _CLIP)
    logits = np.log(clipped / (1 - clipped)) / np.array(temperatures)
    survival: NDArray[np.float64] = (1 / (1 + np.exp(-logits))).prod(axis=1)
    return survival
