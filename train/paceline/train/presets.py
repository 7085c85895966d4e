"""Plans of a run: stages, learning rates, batch shapes.

Presets of drafters are in `recipes/`, each beside the recipe that reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WARM_UP = 0.04  # share of the run in which the learning rates rise, as in the reference
_FINAL_RATE = 0.03


@dataclass(frozen=True)
class Stage:
    """One part of a run. A batch has `rows` rows of `length` tokens."""

    name: str
    share: float  # of the run's time or steps
    rows: int
    length: int
    rate: float = 1.0  # factor on the learning rates
    offset: bool = False  # anchor-offset indices: for rows much shorter than the context
    # Read only the first documents: the texts that the target wrote for its drafter.
    focus: bool = False


@dataclass(frozen=True)
class Plan:
    """Learning rates and batch shapes over a run, in stages.

    The run ends after `minutes` of stepping or after `steps`, whichever is first.
    """

    stages: tuple[Stage, ...]  # in order; their shares add up to 1
    minutes: float  # budget of stepping time
    steps: int  # budget of steps
    focus: int = 0  # number of documents at the start of the stream that stages with `focus` read
    warm_up: int = 20  # steps in which the rates rise
    final_rate: float = 0.1  # share of a stage's rate that is left at its end

    def progress(self, step: int, elapsed: float) -> float:
        """Return the share of the run done, 0 to 1, after `step` steps and `elapsed` seconds."""
        return min(1.0, max(step / self.steps, elapsed / (60 * self.minutes)))

    def stage(self, progress: float) -> tuple[Stage, float]:
        """Return the stage at a share of the run, and the share of the stage that is done."""
        begun = 0.0
        for stage in self.stages:
            if progress < begun + stage.share:
                break
            begun += stage.share
        return stage, min(1.0, (progress - begun) / stage.share)

    def rate(self, step: int, progress: float) -> float:
        """Return the factor on the learning rates: a short warm-up, and a cosine in each stage."""
        stage, done = self.stage(progress)
        cosine = (1 + math.cos(math.pi * done)) / 2
        fall = self.final_rate + (1 - self.final_rate) * cosine
        return stage.rate * fall * min(1.0, (step + 1) / self.warm_up)

    def documents(self, progress: float) -> int | None:
        """Return how many documents the next batch is drawn from; None: all."""
        return (self.focus or None) if self.stage(progress)[0].focus else None

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        stage, _ = self.stage(progress)
        return stage.rows, stage.length


class CosinePlan(Plan):
    """A plan with one cosine over the whole run, whatever its stages."""

    def rate(self, step: int, progress: float) -> float:
        """Return the factor on the learning rates: a linear rise, then a cosine."""
        fall = _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
        return fall * min(1.0, progress / _WARM_UP + 1 / (1 + _WARM_UP * self.steps))


def mixed_stages(own_from: float, rows: int, length: int) -> tuple[Stage, ...]:
    """All texts until a share of the run, the target's own texts from there on."""
    both = (
        Stage("mixed", own_from, rows, length),
        Stage("own", 1 - own_from, rows, length, focus=True),
    )
    return tuple(stage for stage in both if stage.share > 0)


@dataclass(frozen=True, kw_only=True)
class LayerPreset:
    """How a drafter that reads a target is trained. Ends when `minutes` or `steps` are used up,
    whichever is first."""

    minutes: float
    steps: int
    adamw_rate: float
    muon_rate: float | None = None  # learning rate of the matrices; None: AdamW for all parameters
    files: int = 1_000_000  # training files that are read
    own_texts: int = 0  # texts that the target writes after pieces of files
    # Conversations that an instruct model writes; the run then reads nothing else.
    conversations: int = 0
    draft_vocab_size: int = 0  # tokens that can be drafted, the most frequent ones; 0: all


@dataclass(frozen=True, kw_only=True)
class UnrolledPreset(LayerPreset):
    """How a layer is trained over its own outputs at several depths (training-time test). Lengths
    are in tokens, shares of the run 0 to 1."""

    rows: int
    length: int  # of a row; of an answer in a run on conversations
    levels: int = 5  # depths of the training-time test
    # Weight of a depth relative to the one before: deeper nodes are reached less often.
    depth_decay: float = 0.8
    window: int = 0
    # From this share of the run on, only texts that the target wrote are read.
    own_from: float = 1.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """See :func:`mixed_stages`."""
        return mixed_stages(self.own_from, self.rows, self.length)
