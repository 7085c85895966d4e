"""The recipe of `lm`: presets and arguments."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.train.recipes.base import Recipe, given, numbers

if TYPE_CHECKING:
    from paceline.train.corpus import Corpus
    from paceline.train.run import Run

_CHUNK = 8  # positions that are kept together


@dataclass(frozen=True, kw_only=True)
class BudgetPreset:
    """How a small language model is trained under KV budgets (BudgetDraft). Lengths are in tokens.

    Ends when `minutes` or `steps` are used up, whichever is first.
    """

    minutes: float
    steps: int
    adamw_rate: float
    texts: int  # that the target writes
    prefix: int  # tokens of a text that are read; the budget is for their KV
    continuation: int  # tokens behind them whose next tokens are learnt
    budgets: tuple[int, ...]
    # Rank of the updates of the matrices, where only these are trained; 0: all weights are trained.
    rank: int = 0
    consistency: float = 0.5  # weight of the loss under a budget (lambda)
    warm_up: int = 150  # steps in which the rate rises

    def __post_init__(self) -> None:
        if self.rank < 0 or not 0 < self.adamw_rate < math.inf:
            chosen = f"the rank is {self.rank} and the rate {self.adamw_rate}"
            raise ValueError(f"{chosen}, expected 0 or more, and a finite one above 0")
        if not 0 <= self.consistency < math.inf:
            raise ValueError(f"--consistency is {self.consistency}, expected a finite one from 0")
        if not self.budgets or not _CHUNK <= min(self.budgets) <= max(self.budgets) < self.prefix:
            raise ValueError(
                f"budgets are {self.budgets}, expected at least one, from {_CHUNK} on and below "
                f"the {self.prefix} tokens of --prefix"
            )

    @property
    def budget_weights(self) -> dict[int, float]:
        """How often each budget is drawn; 0.4, 0.3, 0.2 and 0.1 of four, the smallest first."""
        rising = sorted(self.budgets)
        total = sum(range(1, len(rising) + 1))
        return {budget: (len(rising) - at) / total for at, budget in enumerate(rising)}


LM_PRESETS: dict[str, BudgetPreset] = {
    # For two CPU cores: short texts, and updates of low rank.
    "cpu": BudgetPreset(
        minutes=120, steps=2000, adamw_rate=2e-4, texts=1000, prefix=1024, continuation=64,
        budgets=(64, 128, 256, 512), rank=16, warm_up=50,
    ),
    # The paper's (section 4): all weights.
    "paper": BudgetPreset(
        minutes=72 * 60, steps=5000, adamw_rate=1e-5, texts=5000, prefix=16_128, continuation=256,
        budgets=(256, 512, 1024, 2048),
    ),
}  # fmt: skip


class LmRecipe(Recipe[BudgetPreset]):
    """How a small language model is trained to draft under KV budgets."""

    method = "lm"
    help = "train a small language model further, to draft for a target under KV budgets"
    presets = LM_PRESETS
    trainer = "paceline.train.lm:LmTrainer"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--from", dest="start", type=Path, required=True, metavar="DIR",
            help="the small language model: a folder or GGUF file with the target's tokenizer",
        )  # fmt: skip
        parser.add_argument(
            "--budgets", type=numbers, metavar="N[,N...]", help="KV budgets that are trained"
        )
        parser.add_argument("--prefix", type=int, metavar="N", help="tokens read before a draft")
        parser.add_argument(
            "--consistency", type=float, metavar="F", help="weight of the loss under a budget"
        )
        parser.add_argument(
            "--rank", type=int, metavar="N", help="rank of updates of matrices; 0: all weights"
        )
        parser.add_argument("--rate", type=float, metavar="F", help="learning rate")

    def vary(self, preset: BudgetPreset, args: Namespace) -> BudgetPreset:
        chosen = given(
            budgets=args.budgets, prefix=args.prefix, rank=args.rank, adamw_rate=args.rate,
            consistency=args.consistency,
        )  # fmt: skip
        return replace(preset, **chosen)

    def train(self, args: Namespace, preset: BudgetPreset, corpus: Corpus, run: Run) -> None:
        self.load_trainer(args.target, preset).train(corpus, run, args.out, args.start)
