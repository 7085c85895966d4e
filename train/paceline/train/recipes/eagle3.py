"""The recipe of `eagle3`: presets and arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from paceline.train.presets import UnrolledPreset
from paceline.train.recipes.base import LayerRecipe, given


@dataclass(frozen=True, kw_only=True)
class Eagle3Preset(UnrolledPreset):
    """A layer's shape and how it is trained."""

    # Target layers whose outputs are fused, as in `DSparkPreset`; none: the usual.
    taps: tuple[float, ...]
    fc_norm: bool = False  # both norms are EAGLE-3.1's
    norm_output: bool = False


EAGLE3_PRESETS: dict[str, Eagle3Preset] = {
    # For the demo target on one CPU core.
    "cpu": Eagle3Preset(
        taps=(1, 4, 6), window=128, levels=4, minutes=40, steps=20_000, rows=4, length=256,
        muon_rate=0.02, adamw_rate=3e-3, files=400, own_texts=1536, own_from=0.4,
    ),
    # For SmolLM2-135M-Instruct on two CPU cores: answers of the target alone. The signals are those
    # of the preset of DSpark.
    "smollm2": Eagle3Preset(
        taps=(2, 0.5, -3, -1), window=256, levels=3, minutes=60, steps=100_000, rows=4, length=320,
        muon_rate=0.02, adamw_rate=2e-3, conversations=4096, draft_vocab_size=6144,
    ),
    # The paper's: outputs of three layers, the whole context, AdamW (section 4).
    "paper": Eagle3Preset(
        taps=(), minutes=72 * 60, steps=200_000, rows=16, length=2048, adamw_rate=5e-5, levels=7,
        own_texts=500_000, own_from=0.0,
    ),
}  # fmt: skip


class Eagle3Recipe(LayerRecipe[Eagle3Preset]):
    """How an EAGLE-3 layer is trained."""

    method = "eagle3"
    help = "train an EAGLE-3 layer for a target"
    presets = EAGLE3_PRESETS
    trainer = "paceline.train.eagle3:Eagle3Trainer"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--levels", type=int, metavar="N", help="depths of the training-time test"
        )
        parser.add_argument(
            "--norms", action="store_true",
            help="EAGLE-3.1: norms of the target's states and outputs",
        )  # fmt: skip

    def chosen(self, args: Namespace) -> dict[str, dict[str, Any]]:
        return {
            **super().chosen(args),
            "--levels": given(levels=args.levels),
            "--norms": {"fc_norm": True, "norm_output": True} if args.norms else {},
        }
