"""How far a run is, and the learning rate, documents and batch shape at that point."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from statistics import median

from paceline.train.preset import Preset

_WARM_UP_STEPS = 20
# A step this many times the usual one was paused (SIGSTOP, suspend), not slow.
_PAUSE_FACTOR = 20.0


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


class Plan(ABC):
    """Learning rates and batch shapes over a run.

    The run ends after `minutes` of stepping or after `steps`, whichever is first.
    """

    minutes: float
    steps: int

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run done, 0 to 1, after `step` steps and `elapsed` seconds of stepping."""
        return min(1.0, max(step / self.steps, elapsed / (60 * self.minutes)))

    @abstractmethod
    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates."""

    @abstractmethod
    def documents(self, progress: float) -> int | None:
        """How many documents the next batch is drawn from; None: all."""

    @abstractmethod
    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""


@dataclass(frozen=True)
class Schedule(Plan):
    """The plan of a run that trains a language model."""

    preset: Preset
    minutes: float
    steps: int

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a short warm-up, constant, then a linear fall."""
        p = self.preset
        fall = max(0.0, progress - p.decay_from) / (1 - p.decay_from)
        return min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 - (1 - p.final_rate) * fall)

    def documents(self, progress: float) -> int | None:
        return self.preset.focus_files if progress >= self.preset.focus_from else None

    def shape(self, progress: float) -> tuple[int, int]:
        begun = [(rows, length) for start, rows, length in self.preset.shapes if start <= progress]
        return begun[-1]


@dataclass(frozen=True)
class Stage:
    """One part of a run (LongSpec, section 4.1, "Training Process").

    A batch has `rows` rows of `length` tokens. `rate` is a factor on the learning rates.
    """

    name: str
    share: float
    """Of the run's time or steps."""
    rows: int
    length: int
    rate: float = 1.0
    offset: bool = False
    """Anchor-offset indices: for rows much shorter than the context."""
    own: bool = False
    """Read only the texts that the target wrote, not the corpus as well."""


@dataclass(frozen=True)
class StagePlan(Plan):
    """The plan of a run that trains a drafter in stages.

    Attributes:
        stages: In order; their shares add up to 1.
        minutes: Budget of stepping time.
        steps: Budget of steps.
        own: Number of documents at the start of the stream that the target wrote.
        warm_up: Steps in which the rates rise.
        final_rate: Share of a stage's rate that is left at its end.
    """

    stages: tuple[Stage, ...]
    minutes: float
    steps: int
    own: int = 0
    warm_up: int = _WARM_UP_STEPS
    final_rate: float = 0.1

    def stage(self, progress: float) -> tuple[Stage, float]:
        """The stage at a share of the run, and the share of the stage that is done."""
        begun = 0.0
        for stage in self.stages:
            if progress < begun + stage.share:
                break
            begun += stage.share
        return stage, min(1.0, (progress - begun) / stage.share)

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a short warm-up, and a cosine in each stage."""
        stage, done = self.stage(progress)
        cosine = (1 + math.cos(math.pi * done)) / 2
        fall = self.final_rate + (1 - self.final_rate) * cosine
        return stage.rate * fall * min(1.0, (step + 1) / self.warm_up)

    def documents(self, progress: float) -> int | None:
        return (self.own or None) if self.stage(progress)[0].own else None

    def shape(self, progress: float) -> tuple[int, int]:
        stage, _ = self.stage(progress)
        return stage.rows, stage.length
