"""Presets of `paceline train online`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    """Share of tokens from texts of the kind that the drafter was made with, against forgetting.
    0: recorded texts alone."""
    old_texts: int = 96
    """Number of such texts that the target writes; the rest of the share is files."""
    warm_up: int = 10
    """Steps in which the rates rise."""

    def __post_init__(self) -> None:
        if not 0 <= self.old_share < 1:
            raise ValueError(f"the old share is {self.old_share}, expected 0 to below 1")


PRESETS: dict[str, OnlinePreset] = {
    # For the demo drafters on one CPU core.
    "cpu": OnlinePreset(
        minutes=5, steps=5000, length=512,
        rows={"dspark": 2, "longspec": 4, "lm": 4},
        muon_rate={"dspark": 0.01, "longspec": 0.008, "lm": 0.015},
        adamw_rate={"dspark": 1.5e-3, "longspec": 1.2e-3, "lm": 2.5e-3},
    ),
}  # fmt: skip
