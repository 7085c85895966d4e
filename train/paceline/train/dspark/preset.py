"""Presets of `paceline train dspark`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.train.schedule import Plan, Stage

if TYPE_CHECKING:
    from paceline.drafter.methods.dspark import DSparkConfig

_WARM_UP = 0.04  # share of the run in which the learning rates rise, as in the reference
_FINAL_RATE = 0.03


@dataclass(frozen=True)
class DSparkPreset:
    """A drafter's shape and how it is trained. Lengths are in tokens, shares of the run 0 to 1."""

    taps: tuple[int, ...]
    """Target layers whose outputs are read; negative ones count from the last."""
    layers: int
    block: int
    markov_rank: int
    minutes: float
    steps: int
    rows: int
    length: int
    anchors: int
    """Blocks of a row, at random positions."""
    adamw_rate: float
    muon_rate: float | None = None
    """Learning rate of the matrices; None: AdamW for all."""
    window: int = 0
    state_input: bool = False
    markov_head: str = "vanilla"
    confidence: bool = True
    own_from: float = 1.0
    """From this share of the run on, only texts that the target wrote are read."""
    own_texts: int = 0
    files: int = 1_000_000
    conversations: int = 0
    """Conversations that an instruct model writes; the run then reads nothing else, and `length` is
    of answers."""
    draft_vocab_size: int = 0
    """Tokens that can be drafted, the most frequent ones; 0: all."""
    ce: float = 0.1
    """Weight of the cross-entropy with the target's distribution (equation 12)."""
    tv: float = 0.9
    """Weight of the distance of the two distributions."""
    certainty: float = 1.0
    """Weight of the confidence head's loss."""

    def config(self, target: Path, mask_token: int) -> DSparkConfig:
        """The shape of a drafter for the model in the folder `target`."""
        from paceline.drafter.methods.dspark import DSparkConfig

        names = (
            "taps", "block", "layers", "window", "markov_rank", "markov_head", "confidence",
            "draft_vocab_size", "state_input",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        return DSparkConfig.for_target(target, mask_token=mask_token, **fields)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All texts until `own_from`, the target's own texts from there on."""
        both = (
            Stage("mixed", self.own_from, self.rows, self.length),
            Stage("own", 1 - self.own_from, self.rows, self.length, focus=True),
        )
        return tuple(stage for stage in both if stage.share > 0)

    def without_heads(self) -> DSparkPreset:
        """The same backbone with neither head: DFlash's shape."""
        return replace(self, markov_rank=0, confidence=False)


class DSparkPlan(Plan):
    """A plan with one cosine over the whole run."""

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a linear rise, then a cosine."""
        fall = _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
        return fall * min(1.0, progress / _WARM_UP + 1 / (1 + _WARM_UP * self.steps))


PRESETS: dict[str, DSparkPreset] = {
    # For the demo target on one CPU core.
    "cpu": DSparkPreset(
        taps=(1, 4, 6), layers=2, block=6, markov_rank=128, window=128,
        minutes=40, steps=20_000, rows=2, length=512, anchors=64,
        muon_rate=0.02, adamw_rate=3e-3, files=400, own_texts=1536, own_from=0.4,
    ),
    # For SmolLM2-135M-Instruct on two CPU cores: answers of the target alone.
    "smollm2": DSparkPreset(
        taps=(2, 15, 27, 29), layers=1, block=3, markov_rank=128, window=256, state_input=True,
        minutes=60, steps=100_000, rows=8, length=320, anchors=96, muon_rate=0.02, adamw_rate=2e-3,
        ce=1.0, tv=0.5, certainty=0.1, conversations=4096, draft_vocab_size=6144,
    ),
    # The paper's for Qwen3-4B: 5 layers, block 7, the whole context, AdamW (section 4.1).
    "paper": DSparkPreset(
        taps=(1, 9, 17, 25, 33), layers=5, block=7, markov_rank=256,
        minutes=72 * 60, steps=25_000, rows=512, length=4096, anchors=512, adamw_rate=6e-4,
        own_texts=1_300_000, own_from=0.0,
    ),
}  # fmt: skip
