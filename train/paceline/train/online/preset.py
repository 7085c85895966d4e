"""Schedules that `paceline train online` knows by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_FINAL_RATE = 0.05


@dataclass(frozen=True)
class OnlinePreset:
    """How a trained drafter is trained further. Lengths are in tokens."""

    minutes: float
    steps: int
    rows: Mapping[str, int]
    """Of a step, by method."""
    length: int
    """Of a row."""
    muon_rate: Mapping[str, float]
    """For matrices, by method."""
    adamw_rate: Mapping[str, float]
    """For the rest, by method."""
    old_share: float = 0.5
    """Of the tokens that are read: texts of the kind that the drafter was made with, so that it
    does not unlearn them. 0: recorded texts alone."""
    old_texts: int = 96
    """Texts of that kind that the target writes itself; the rest of the share are files."""
    warm_up: int = 10
    """Steps in which the rates rise."""

    def __post_init__(self) -> None:
        if not 0 <= self.old_share < 1:
            raise ValueError(f"the old share is {self.old_share}, expected 0 to below 1")


@dataclass(frozen=True)
class OnlinePlan:
    """When a run does what: the :class:`~paceline.train.loop.Plan` of an online run."""

    preset: OnlinePreset
    rows: int
    minutes: float
    steps: int

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run done, 0 to 1, after `step` steps and `elapsed` seconds of stepping."""
        return min(1.0, max(step / self.steps, elapsed / (60 * self.minutes)))

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a warm-up, then a cosine."""
        fall = _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
        return fall * min(1.0, (step + 1) / self.preset.warm_up)

    def documents(self, progress: float) -> int | None:
        """All documents, always."""
        return None

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        return self.rows, self.preset.length


PRESETS: dict[str, OnlinePreset] = {
    # For the demo drafters on one CPU core.
    "cpu": OnlinePreset(
        minutes=5, steps=5000, length=512,
        rows={"dspark": 2, "longspec": 4, "lm": 4},
        muon_rate={"dspark": 0.01, "longspec": 0.008, "lm": 0.015},
        adamw_rate={"dspark": 1.5e-3, "longspec": 1.2e-3, "lm": 2.5e-3},
    ),
}  # fmt: skip
