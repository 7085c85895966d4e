"""How far a run is, and what that means for learning rate and row length."""

import math
from dataclasses import dataclass, field
from statistics import median

from paceline.train.preset import Preset

_WARM_UP_STEPS = 20
# A step this many times the usual one was paused (SIGSTOP, suspend), not slow.
_PAUSE_FACTOR = 20.0
_CONTINUED_FINAL_RATE = 0.05


@dataclass
class Clock:
    """Time spent stepping, in seconds; what a pause adds to one step is not counted."""

    elapsed: float = 0.0
    _recent: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Count one step of `seconds`."""
        if len(self._recent) >= 5:
            usual = median(self._recent)
            if seconds > _PAUSE_FACTOR * usual:
                seconds = usual
        self._recent = [*self._recent[-20:], seconds]
        self.elapsed += seconds


class Budgeted:
    """A run that ends when its stepping time or its steps run out, whichever is first.

    Attributes:
        minutes: Stepping time.
        steps: Steps.
    """

    minutes: float
    steps: int

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run done, 0 to 1, after `step` steps and `elapsed` seconds of stepping."""
        return min(1.0, max(step / self.steps, elapsed / (60 * self.minutes)))


@dataclass(frozen=True)
class Schedule(Budgeted):
    """Learning rate and row length as functions of the share of the run that is done."""

    preset: Preset
    minutes: float
    steps: int

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a short warm-up, constant, then a linear fall."""
        p = self.preset
        fall = max(0.0, progress - p.decay_from) / (1 - p.decay_from)
        return min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 - (1 - p.final_rate) * fall)

    def documents(self, progress: float) -> int | None:
        """How many documents the next batch is drawn from; None: all."""
        return self.preset.focus_files if progress >= self.preset.focus_from else None

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        begun = [(rows, length) for start, rows, length in self.preset.shapes if start <= progress]
        return begun[-1]


@dataclass(frozen=True)
class ContinuedPlan(Budgeted):
    """The :class:`~paceline.train.loop.Plan` of a run that takes a trained drafter further.

    Attributes:
        rows: Of a batch.
        length: Of a row. Unit: tokens.
        warm_up: Steps in which the rates rise.
        minutes: Budget of stepping time.
        steps: Budget of steps.
    """

    rows: int
    length: int
    warm_up: int
    minutes: float
    steps: int

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a warm-up, then a cosine."""
        cosine = (1 + math.cos(math.pi * progress)) / 2
        fall = _CONTINUED_FINAL_RATE + (1 - _CONTINUED_FINAL_RATE) * cosine
        return fall * min(1.0, (step + 1) / self.warm_up)

    def documents(self, progress: float) -> int | None:
        """All documents, always."""
        return None

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        return self.rows, self.length
