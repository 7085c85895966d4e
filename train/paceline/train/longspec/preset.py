"""Stages and sizes that `paceline train longspec` knows by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.train.schedule import Budgeted

_WARM_UP_STEPS = 20
_FINAL_RATE = 0.1  # of a stage's rate, at its end


@dataclass(frozen=True)
class Stage:
    """One part of a run (LongSpec, section 4.1, "Training Process").

    A batch has `rows` rows of `length` tokens. `rate` is a factor on the learning rates: it falls
    by a cosine over the stage.
    """

    name: str
    share: float
    """Of the run's time or steps."""
    rows: int
    length: int
    rate: float
    offset: bool = False
    """Anchor-offset indices: for rows much shorter than the context."""
    own: bool = False
    """Read the target's own texts alone, not the corpus as well."""


@dataclass(frozen=True)
class LongSpecPreset:
    """How a layer is trained. Ends when `minutes` or `steps` are used up, whichever is first."""

    stages: tuple[Stage, ...]
    minutes: float
    steps: int
    adamw_rate: float
    muon_rate: float | None = None
    """For matrices; None: AdamW for everything, as in the paper."""
    levels: int = 5
    """Depth of the trees drafted with it: every lag from 1 to this is trained."""
    lags: int = 1
    """Lags a step, drawn anew for each; all of them cost only what cross-attention and the rest of
    the layer cost, since the target and self-attention run once."""
    lag_decay: float = 1.0
    """Weight of a lag against the one before: deeper nodes are reached less often."""
    offset: bool = True
    """False: the ablation without anchor-offset indices."""
    noise: bool = True
    """False: the ablation without flash noisy training: lag 1 alone."""
    window: int = 512
    intermediate: int | None = None
    files: int = 400
    own_texts: int = 1536

    def __post_init__(self) -> None:
        if not math.isclose(sum(stage.share for stage in self.stages), 1):
            raise ValueError("the shares of the stages must add up to 1")
        if not 1 <= self.lags <= self.levels:
            raise ValueError(f"lags is {self.lags}, expected 1 to the {self.levels} levels")

    @property
    def trained_lags(self) -> tuple[int, ...]:
        """The lags that training draws from."""
        return tuple(range(1, self.levels + 1)) if self.noise else (1,)

    def ablated(self, *, offset: bool, noise: bool) -> LongSpecPreset:
        """The same without anchor-offset indices, or without noise."""
        return replace(self, offset=self.offset and offset, noise=self.noise and noise)


@dataclass(frozen=True)
class StagePlan(Budgeted):
    """When which stage runs: the :class:`~paceline.train.loop.Plan` of a LongSpec run.

    `own` documents, the target's own texts, come first in the stream.
    """

    preset: LongSpecPreset
    minutes: float
    steps: int
    own: int

    def stage(self, progress: float) -> tuple[Stage, float]:
        """The stage, and the share of it that is done."""
        begun = 0.0
        for stage in self.preset.stages:
            if progress < begun + stage.share:
                break
            begun += stage.share
        return stage, min(1.0, (progress - begun) / stage.share)

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a short warm-up, and a cosine in each stage."""
        stage, done = self.stage(progress)
        cosine = (1 + math.cos(math.pi * done)) / 2
        fall = _FINAL_RATE + (1 - _FINAL_RATE) * cosine
        return stage.rate * fall * min(1.0, (step + 1) / _WARM_UP_STEPS)

    def documents(self, progress: float) -> int | None:
        """How many documents the next batch is drawn from; None: all."""
        return self.own if self.stage(progress)[0].own else None

    def shape(self, progress: float) -> tuple[int, int]:
        """(rows, length in tokens) of the next batch."""
        stage, _ = self.stage(progress)
        return stage.rows, stage.length


PRESETS: dict[str, LongSpecPreset] = {
    # For the demo target on one or two CPU cores.
    "cpu": LongSpecPreset(
        stages=(
            Stage("short", 0.48, rows=4, length=512, rate=1.0, offset=True),
            Stage("long", 0.1, rows=1, length=4096, rate=0.4),
            Stage("fine", 0.42, rows=4, length=512, rate=0.6, offset=True, own=True),
        ),
        minutes=64, steps=20_000, muon_rate=0.02, adamw_rate=3e-3, lags=3, lag_decay=0.85,
    ),
    # The paper's: AdamW, one lag a step, long stages at a hundredth of the rate (appendix D).
    "paper": LongSpecPreset(
        stages=(
            Stage("short", 0.8, rows=2048, length=1024, rate=1.0, offset=True),
            Stage("long", 0.1, rows=256, length=32_768, rate=0.01),
            Stage("fine", 0.1, rows=256, length=32_768, rate=0.01, own=True),
        ),
        minutes=72 * 60, steps=4000, adamw_rate=5e-4, files=1_000_000, own_texts=20_000,
    ),
}  # fmt: skip
