"""The recipe of `longspec`: presets and arguments."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from paceline.train.presets import LayerPreset, Stage
from paceline.train.recipes.base import LayerRecipe, given, numbers

_MIN_CONTEXT = 8  # a chunk; the first four positions are always read


@dataclass(frozen=True, kw_only=True)
class LongSpecPreset(LayerPreset):
    """How a layer is trained."""

    stages: tuple[Stage, ...]
    levels: int = 5  # depth of the trees drafted with it: every lag from 1 to this is trained
    # Lags a step of a run on texts, drawn anew for each. Another lag costs its cross-attention and
    # feed-forward block; the target and self-attention run once.
    lags: int = 1
    # Weight of a lag relative to the one before: deeper nodes are reached less often.
    lag_decay: float = 1.0
    offset: bool = True  # false: the ablation without anchor-offset indices
    noise: bool = True  # false: the ablation without flash noisy training, with lag 1 alone
    window: int = 512
    intermediate: int | None = None
    files: int = 400
    own_texts: int = 1536
    max_length: int = 0  # longer conversations are left out; 0: none. Unit: tokens.
    # Numbers of positions that cross-attention reads in a run on conversations, as the drafter's
    # option `context`; 0, or none given: all positions.
    contexts: tuple[int, ...] = ()
    sparse_weight: float = 0.5  # how often few positions are read, relative to all

    def __post_init__(self) -> None:
        if self.contexts and not self.conversations:
            raise ValueError("this preset trains no contexts: give --preset smollm2")
        if any(0 < context < _MIN_CONTEXT for context in self.contexts):
            raise ValueError(f"contexts are {self.contexts}, expected 0 or {_MIN_CONTEXT} and more")
        if not math.isclose(sum(stage.share for stage in self.stages), 1):
            raise ValueError("the shares of the stages must add up to 1")
        if not 1 <= self.lags <= self.levels:
            raise ValueError(f"lags is {self.lags}, expected 1 to the {self.levels} levels")

    @property
    def trained_lags(self) -> tuple[int, ...]:
        return tuple(range(1, self.levels + 1)) if self.noise else (1,)

    @property
    def context_weights(self) -> dict[int, float]:
        """How often each context is drawn; smaller ones more often."""
        sparse = sorted({size for size in self.contexts if size}, reverse=True)
        total = sum(range(1, len(sparse) + 1))
        weights = {size: self.sparse_weight * rank / total for rank, size in enumerate(sparse, 1)}
        return weights if sparse and 0 not in self.contexts else {**weights, 0: 1.0}


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
    # As the shipped layer was trained, on a GPU; its steps, and not its minutes, end the run.
    "shipped": LongSpecPreset(
        stages=(
            Stage("offsets", 0.45, rows=32, length=320, offset=True),
            Stage("plain", 0.55, rows=32, length=320),
        ),
        minutes=math.inf, steps=2042, muon_rate=0.02, adamw_rate=2e-3, levels=4, lag_decay=0.7,
        conversations=19_032, draft_vocab_size=16_384,
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


class LongSpecRecipe(LayerRecipe[LongSpecPreset]):
    """How a LongSpec layer is trained."""

    method = "longspec"
    help = "train a LongSpec layer for a target"
    presets = LONGSPEC_PRESETS
    trainer = "paceline.train.longspec:LongSpecTrainer"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--levels", type=int, metavar="N", help="depth of a draft: lags 1 to N")
        parser.add_argument(
            "--no-offset", action="store_true", help="ablation: without anchor-offset indices"
        )
        parser.add_argument(
            "--no-noise", action="store_true", help="ablation: without flash noisy training"
        )
        parser.add_argument(
            "--contexts", type=numbers, metavar="N[,N...]",
            help="positions of the target that are read, 0: all; for the preset smollm2",
        )  # fmt: skip
        parser.add_argument(
            "--max-length", type=int, metavar="N",
            help="leave out conversations of more tokens, for the preset smollm2",
        )  # fmt: skip

    def chosen(self, args: Namespace) -> dict[str, dict[str, Any]]:
        return {
            **super().chosen(args),
            "--levels": given(levels=args.levels),
            "--no-offset": {"offset": False} if args.no_offset else {},
            "--no-noise": {"noise": False} if args.no_noise else {},
            "--contexts": given(contexts=args.contexts),
            "--max-length": given(max_length=args.max_length),
        }
