"""The recipe of `dspark`: presets and arguments."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.train.presets import LayerPreset, Stage, mixed_stages
from paceline.train.recipes.base import LayerRecipe, given

if TYPE_CHECKING:
    from paceline.drafter.methods.dspark import DSparkConfig


# What the presets for conversations depart from (DSpark, sections 3.1 and 3.3).
_AS_PAPER = {"state_input": False, "ce": 0.1, "tv": 0.9, "certainty": 1.0}


@dataclass(frozen=True, kw_only=True)
class DSparkPreset(LayerPreset):
    """A drafter's shape and how it is trained. Lengths are in tokens, shares of the run 0 to 1."""

    # Target layers whose outputs are read; negative ones count from the last, fractions are shares.
    taps: tuple[float, ...]
    layers: int
    block: int
    markov_rank: int
    rows: int
    length: int  # of a row; of an answer in a run on conversations
    anchors: int  # blocks of a row, at random positions
    window: int = 0
    # Fed for each token to be drafted; None: the one that ends a text.
    mask_token: int | None = None
    state_input: bool = False
    confidence: bool = True
    # From this share of the run on, only texts that the target wrote are read.
    own_from: float = 1.0
    ce: float = 0.1  # weight of the cross-entropy with the target's distribution (equation 12)
    tv: float = 0.9  # weight of the distance of the two distributions
    certainty: float = 1.0  # weight of the confidence head's loss

    def config(self, target: Path, end: int) -> DSparkConfig:
        """Return the shape of a drafter for the model in the folder `target`, whose texts end with
        the token `end`."""
        from paceline.drafter.methods.dspark import DSparkConfig

        names = (
            "taps", "block", "layers", "window", "markov_rank", "confidence",
            "draft_vocab_size", "state_input",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        mask_token = end if self.mask_token is None else self.mask_token
        return DSparkConfig.for_target(target, mask_token=mask_token, **fields)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """See :func:`mixed_stages`."""
        return mixed_stages(self.own_from, self.rows, self.length)


DSPARK_PRESETS: dict[str, DSparkPreset] = {
    # For the demo target on one CPU core.
    "cpu": DSparkPreset(
        taps=(1, 4, 6), layers=2, block=6, markov_rank=128, window=128,
        minutes=40, steps=20_000, rows=2, length=512, anchors=64,
        muon_rate=0.02, adamw_rate=3e-3, files=400, own_texts=1536, own_from=0.4,
    ),
    # For SmolLM2-135M-Instruct on two CPU cores: answers of the target alone.
    "smollm2": DSparkPreset(
        taps=(2, 0.5, -3, -1), layers=1, block=3, markov_rank=128, window=256, state_input=True,
        minutes=60, steps=100_000, rows=8, length=320, anchors=96, muon_rate=0.02, adamw_rate=2e-3,
        ce=1.0, tv=0.5, certainty=0.1, conversations=4096, draft_vocab_size=6144,
    ),
    # As the shipped drafter was trained, on a GPU; its steps, and not its minutes, end the run.
    "shipped": DSparkPreset(
        taps=(2, 0.5, -3, -1), layers=3, block=5, markov_rank=128, window=256, state_input=True,
        minutes=math.inf, steps=2204, rows=32, length=320, anchors=112, muon_rate=0.02,
        adamw_rate=2e-3, ce=1.0, tv=0.5, certainty=0.1, conversations=19_032,
        draft_vocab_size=16_384,
    ),
    # The paper's for Qwen3-4B: 5 layers, block 7, the whole context, AdamW (section 4.1).
    "paper": DSparkPreset(
        taps=(1, 9, 17, 25, 33), layers=5, block=7, markov_rank=256,
        minutes=72 * 60, steps=25_000, rows=512, length=4096, anchors=512, adamw_rate=6e-4,
        own_texts=1_300_000, own_from=0.0,
    ),
}  # fmt: skip


class DSparkRecipe(LayerRecipe[DSparkPreset]):
    """How a DSpark drafter is trained."""

    method = "dspark"
    help = "train a DSpark drafter for a target"
    presets = DSPARK_PRESETS
    trainer = "paceline.train.dspark:DSparkTrainer"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--layers", type=int, metavar="N", help="layers of the backbone")
        parser.add_argument("--block", type=int, metavar="N", help="tokens of a block")
        parser.add_argument(
            "--no-heads", action="store_true",
            help="neither a sequential nor a confidence head, which is DFlash",
        )  # fmt: skip
        parser.add_argument(
            "--as-paper", action="store_true",
            help="no state input, which presets smollm2 and shipped have, and the paper's losses",
        )  # fmt: skip
        parser.add_argument(
            "--losses", type=_losses, metavar="CE,DISTANCE,CONFIDENCE", help="weights of the losses"
        )

    def chosen(self, args: Namespace) -> dict[str, dict[str, Any]]:
        ce, tv, certainty = args.losses or (None, None, None)
        return {
            **super().chosen(args),
            "--layers": given(layers=args.layers),
            "--block": given(block=args.block),
            "--no-heads": {"markov_rank": 0, "confidence": False} if args.no_heads else {},
            "--as-paper": _AS_PAPER if args.as_paper else {},
            "--losses": given(ce=ce, tv=tv, certainty=certainty),
        }


def _losses(text: str) -> tuple[float, float, float]:
    ce, tv, certainty = map(float, text.split(","))
    return ce, tv, certainty
