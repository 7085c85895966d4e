"""Presets of `paceline train longspec`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.train.schedule import Stage


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
    """Lags a step, drawn anew for each. Another lag costs its cross-attention and feed-forward
    block; the target and self-attention run once."""
    lag_decay: float = 1.0
    """Weight of a lag relative to the one before: deeper nodes are reached less often."""
    offset: bool = True
    """False: the ablation without anchor-offset indices."""
    noise: bool = True
    """False: the ablation without flash noisy training, with lag 1 alone."""
    window: int = 512
    intermediate: int | None = None
    files: int = 400
    own_texts: int = 1536
    conversations: int = 0
    """Conversations that an instruct model writes; the run then reads nothing else."""
    draft_vocab_size: int = 0
    """Tokens that can be drafted, the most frequent ones; 0: all."""

    def __post_init__(self) -> None:
        if not math.isclose(sum(stage.share for stage in self.stages), 1):
            raise ValueError("the shares of the stages must add up to 1")
        if not 1 <= self.lags <= self.levels:
            raise ValueError(f"lags is {self.lags}, expected 1 to the {self.levels} levels")

    @property
    def trained_lags(self) -> tuple[int, ...]:
        """The lags that training draws from."""
        return tuple(range(1, self.levels + 1)) if self.noise else (1,)


PRESETS: dict[str, LongSpecPreset] = {
    # For the demo target on one or two CPU cores.
    "cpu": LongSpecPreset(
        stages=(
            Stage("short", 0.48, rows=4, length=512, rate=1.0, offset=True),
            Stage("long", 0.1, rows=1, length=4096, rate=0.4),
            Stage("fine", 0.42, rows=4, length=512, rate=0.6, offset=True, focus=True),
        ),
        minutes=64, steps=20_000, muon_rate=0.02, adamw_rate=3e-3, lags=3, lag_decay=0.85,
    ),
    # For SmolLM2-135M-Instruct on two CPU cores: texts of the target alone, whole.
    "smollm2": LongSpecPreset(
        stages=(Stage("texts", 1.0, rows=2, length=1024),),
        minutes=240, steps=100_000, adamw_rate=1.5e-3, levels=2, lags=1, conversations=4096,
        draft_vocab_size=6144,
    ),
    # The paper's: AdamW, one lag a step, long stages at a hundredth of the rate (appendix D).
    "paper": LongSpecPreset(
        stages=(
            Stage("short", 0.8, rows=2048, length=1024, rate=1.0, offset=True),
            Stage("long", 0.1, rows=256, length=32_768, rate=0.01),
            Stage("fine", 0.1, rows=256, length=32_768, rate=0.01, focus=True),
        ),
        minutes=72 * 60, steps=4000, adamw_rate=5e-4, files=1_000_000, own_texts=20_000,
    ),
}  # fmt: skip
