"""Presets of `paceline train`, and their plans: stages, learning rates, batch shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.drafter.methods.dspark import DSparkConfig

_MIN_BUDGET = 8  # a chunk; the first four positions are always read
_WARM_UP = 0.04  # share of the run in which the learning rates rise, as in the reference
_FINAL_RATE = 0.03


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
    """

    stages: tuple[Stage, ...]
    """In order; their shares add up to 1."""

    minutes: float
    """Budget of stepping time."""

    steps: int
    """Budget of steps."""

    focus: int = 0
    """Number of documents at the start of the stream that stages with `focus` read."""

    warm_up: int = 20
    """Steps in which the rates rise."""

    final_rate: float = 0.1
    """Share of a stage's rate that is left at its end."""

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


@dataclass(frozen=True)
class Preset:
    """One model shape with the schedule that trains it.

    Lengths are in tokens, `minutes` in minutes of stepping (pauses do not count), learning rates
    are per step. Training ends when either `minutes` or `steps` is used up, whichever is first.
    """

    # Shape of the Llama-type model; heads are 64 wide.
    width: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    context: int
    # Corpus: how many training files at most, and how many held out.
    files: int
    heldout_files: int
    # Schedule. Stages with `focus` read the first `focus_files` only: a small model writes better
    # text after many epochs of few files than after one of many.
    minutes: float
    steps: int
    stages: tuple[Stage, ...]
    copy_share: float = 0.0
    """Share of rows that end with a second copy of a piece of themselves: trains copying."""
    focus_files: int | None = None
    own_texts: int = 0  # texts that the target writes, as training text for a drafter
    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    wide: bool = False  # train on tests and long files too
    vocabulary: int = 4096
    rope_theta: float = 100_000.0
    head_width: int = 64

    def __post_init__(self) -> None:
        longest = max(stage.length for stage in self.stages)
        if longest > self.context:
            raise ValueError(
                f"rows of {longest} tokens do not fit a context of {self.context}: "
                "lower the lengths in `stages` or raise `context`"
            )

    def plan(self, minutes: float, steps: int) -> Plan:
        """The plan of a run with these budgets."""
        return LmPlan(self.stages, minutes, steps, self.focus_files or 0, final_rate=0.03)


class LmPlan(Plan):
    """A plan whose learning rates are constant for half of the run and then fall linearly."""

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a short warm-up, constant, then a linear fall."""
        fall = max(0.0, 2 * progress - 1)
        return min(1.0, (step + 1) / self.warm_up) * (1 - (1 - self.final_rate) * fall)


LM_PRESETS: dict[str, Preset] = {
    # 14.2 M parameters: writes fluent Python after 80 minutes on two CPU cores.
    "cpu": Preset(
        width=384, layers=8, heads=6, kv_heads=2, ff=1024, context=4096,
        files=120, heldout_files=12, focus_files=48, minutes=80, steps=5000, copy_share=0.5,
        stages=(
            Stage("short", 0.35, rows=4, length=512),
            Stage("middle", 0.05, rows=1, length=2048),
            Stage("middle", 0.45, rows=1, length=2048, focus=True),
            Stage("long", 0.15, rows=1, length=4096, focus=True),
        ),
    ),
    # 1.1 M parameters: the drafter, distilled from the target above on the files of its last
    # stage and on texts that it wrote.
    "lm": Preset(
        width=128, layers=3, heads=2, kv_heads=1, ff=384, context=4096,
        files=120, heldout_files=12, focus_files=48, own_texts=256,
        minutes=9, steps=3000,
        stages=(Stage("short", 0.9, rows=4, length=512), Stage("long", 0.1, rows=1, length=4096)),
    ),
    # 25.7 M parameters on one H200 in under ten minutes, on the whole standard library.
    "gpu": Preset(
        width=512, layers=9, heads=8, kv_heads=2, ff=1280, context=8192,
        files=4000, heldout_files=12, wide=True,
        minutes=8, steps=6000, copy_share=0.15,
        stages=(
            Stage("short", 0.86, rows=16, length=2048), Stage("long", 0.14, rows=4, length=8192),
        ),
    ),
}  # fmt: skip


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
    """Lags a step of a run on texts, drawn anew for each. Another lag costs its cross-attention and
    feed-forward block; the target and self-attention run once."""
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
    max_length: int = 0
    """Longer conversations are left out; 0: none. Unit: tokens."""
    budgets: tuple[int, ...] = ()
    """KV budgets of the cross-attention in a run on conversations; 0, or none given: all
    positions."""
    sparse_weight: float = 0.5
    """Weight of the loss under budgets relative to that with all positions (BudgetDraft's
    lambda)."""

    def __post_init__(self) -> None:
        if self.budgets and not self.conversations:
            raise ValueError("this preset trains no KV budgets: give --preset smollm2")
        if any(0 < each < _MIN_BUDGET for each in self.budgets):
            raise ValueError(f"budgets are {self.budgets}, expected 0 or {_MIN_BUDGET} and more")
        if not math.isclose(sum(stage.share for stage in self.stages), 1):
            raise ValueError("the shares of the stages must add up to 1")
        if not 1 <= self.lags <= self.levels:
            raise ValueError(f"lags is {self.lags}, expected 1 to the {self.levels} levels")

    @property
    def trained_lags(self) -> tuple[int, ...]:
        """The lags that training draws from."""
        return tuple(range(1, self.levels + 1)) if self.noise else (1,)

    @property
    def budget_weights(self) -> dict[int, float]:
        """How often each budget is drawn; smaller ones more often (BudgetDraft, section 3.4)."""
        sparse = sorted({each for each in self.budgets if each}, reverse=True)
        total = sum(range(1, len(sparse) + 1))
        weights = {each: self.sparse_weight * rank / total for rank, each in enumerate(sparse, 1)}
        return weights if sparse and 0 not in self.budgets else {**weights, 0: 1.0}


LONGSPEC_PRESETS: dict[str, LongSpecPreset] = {
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
        stages=(
            Stage("offsets", 0.5, rows=2, length=1024, offset=True),
            Stage("plain", 0.5, rows=2, length=1024, rate=0.6),
        ),
        minutes=240, steps=100_000, muon_rate=0.02, adamw_rate=1.5e-3, levels=4, lag_decay=0.7,
        conversations=4096, draft_vocab_size=6144,
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


def _mixed(own_from: float, rows: int, length: int) -> tuple[Stage, ...]:
    """All texts until a share of the run, the target's own texts from there on."""
    both = (
        Stage("mixed", own_from, rows, length),
        Stage("own", 1 - own_from, rows, length, focus=True),
    )
    return tuple(stage for stage in both if stage.share > 0)


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
            "taps", "block", "layers", "window", "markov_rank", "confidence",
            "draft_vocab_size", "state_input",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        return DSparkConfig.for_target(target, mask_token=mask_token, **fields)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """See :func:`_mixed`."""
        return _mixed(self.own_from, self.rows, self.length)

    def without_heads(self) -> DSparkPreset:
        """The same backbone with neither head: DFlash's shape."""
        return replace(self, markov_rank=0, confidence=False)


class DSparkPlan(Plan):
    """A plan with one cosine over the whole run."""

    def rate(self, step: int, progress: float) -> float:
        """Factor on the learning rates: a linear rise, then a cosine."""
        fall = _FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
        return fall * min(1.0, progress / _WARM_UP + 1 / (1 + _WARM_UP * self.steps))


DSPARK_PRESETS: dict[str, DSparkPreset] = {
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


@dataclass(frozen=True)
class Eagle3Preset:
    """A layer's shape and how it is trained. Lengths are in tokens, shares of the run 0 to 1."""

    taps: tuple[int, ...]
    """Target layers whose outputs are fused; negative ones count from the last; none: the usual."""
    minutes: float
    steps: int
    rows: int
    length: int
    adamw_rate: float
    muon_rate: float | None = None
    """Learning rate of the matrices; None: AdamW for all."""
    levels: int = 5
    """Depths of the training-time test."""
    depth_decay: float = 0.8
    """Weight of a depth relative to the one before: deeper nodes are reached less often."""
    window: int = 0
    fc_norm: bool = False
    """Both norms are EAGLE-3.1's."""
    norm_output: bool = False
    own_from: float = 1.0
    """From this share of the run on, only texts that the target wrote are read."""
    own_texts: int = 0
    files: int = 1_000_000
    conversations: int = 0
    """Conversations that an instruct model writes; the run then reads nothing else, and `length` is
    of answers."""
    draft_vocab_size: int = 0
    """Tokens that can be drafted, the most frequent ones; 0: all."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """See :func:`_mixed`."""
        return _mixed(self.own_from, self.rows, self.length)


EAGLE3_PRESETS: dict[str, Eagle3Preset] = {
    # For the demo target on one CPU core.
    "cpu": Eagle3Preset(
        taps=(1, 4, 6), window=128, levels=4, minutes=40, steps=20_000, rows=4, length=256,
        muon_rate=0.02, adamw_rate=3e-3, files=400, own_texts=1536, own_from=0.4,
    ),
    # For SmolLM2-135M-Instruct on two CPU cores: answers of the target alone. The signals are those
    # of the preset of DSpark.
    "smollm2": Eagle3Preset(
        taps=(2, 15, 27, 29), window=256, levels=3, minutes=60, steps=100_000, rows=4, length=320,
        muon_rate=0.02, adamw_rate=2e-3, conversations=4096, draft_vocab_size=6144,
    ),
    # The paper's: outputs of three layers, the whole context, AdamW (section 4).
    "paper": Eagle3Preset(
        taps=(), minutes=72 * 60, steps=200_000, rows=16, length=2048, adamw_rate=5e-5, levels=7,
        own_texts=500_000, own_from=0.0,
    ),
}  # fmt: skip


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


ONLINE_PRESETS: dict[str, OnlinePreset] = {
    # For the demo drafters on one CPU core.
    "cpu": OnlinePreset(
        minutes=5, steps=5000, length=512,
        rows={"dspark": 2, "eagle3": 2, "longspec": 4, "lm": 4},
        muon_rate={"dspark": 0.01, "eagle3": 0.01, "longspec": 0.008, "lm": 0.015},
        adamw_rate={"dspark": 1.5e-3, "eagle3": 1.5e-3, "longspec": 1.2e-3, "lm": 2.5e-3},
    ),
}  # fmt: skip
