"""How far a run is, and the learning rate, documents and batch shape at that point."""

import math
from dataclasses import dataclass, field
from statistics import median

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


@dataclass(frozen=True)
class Stage:
    """One part of a run. A batch has `rows` rows of `length` tokens."""

    name: str
    share: float
    """Of the run's time or steps."""
    rows: int
    length: int
    rate: float = 1.0
    """Factor on the learning rates."""
    offset: bool = False
    """Anchor-offset indices: for rows much shorter than the context."""
    focus: bool = False
    """Read only the first documents: the texts that the target wrote for its drafter, or the files
    that a target is trained on to the end."""


@dataclass(frozen=True)
class Plan:
    """Learning rates and batch shapes over a run, in stages.

    The run ends after `minutes` of stepping or after `steps`, whichever is first.

    Attributes:
        stages: In order; their shares add up to 1.
        minutes: Budget of stepping time.
        steps: Budget of steps.
        focus: Number of documents at the start of the stream that stages with `focus` read.
        warm_up: Steps in which the rates rise.
        final_rate: Share of a stage's rate that is left at its end.
    """

    stages: tuple[Stage, ...]
    minutes: float
    steps: int
    focus: int = 0
    warm_up: int = 20
    final_rate: float = 0.1

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run done, 0 to 1, after `step` steps and `elapsed` seconds of stepping."""
        return min(1.0, max(step / self.steps, elapsed / (60 * self.minutes)))

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
        """How many documents the next batch is drawn from; None: all."""
        return (self.focus or None) if self.stage(progress)[0].focus else None

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        stage, _ = self.stage(progress)
        return stage.rows, stage.length
