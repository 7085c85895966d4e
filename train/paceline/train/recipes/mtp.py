"""The recipe of `mtp`: presets and arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from paceline.train.presets import UnrolledPreset
from paceline.train.recipes.base import LayerRecipe, given


@dataclass(frozen=True, kw_only=True)
class MtpPreset(UnrolledPreset):
    """How a head is trained; it has the shape of the target's layers."""


MTP_PRESETS: dict[str, MtpPreset] = {
    # As the presets of EAGLE-3: for the demo target on one CPU core, for SmolLM2-135M-Instruct on
    # two, and as in the paper.
    "cpu": MtpPreset(
        window=128, levels=4, minutes=40, steps=20_000, rows=4, length=256, muon_rate=0.02,
        adamw_rate=3e-3, files=400, own_texts=1536, own_from=0.4,
    ),
    "smollm2": MtpPreset(
        window=256, levels=3, minutes=60, steps=100_000, rows=4, length=320, muon_rate=0.02,
        adamw_rate=2e-3, conversations=4096, draft_vocab_size=6144,
    ),
    "paper": MtpPreset(
        minutes=72 * 60, steps=200_000, rows=16, length=2048, adamw_rate=5e-5, levels=7,
        own_texts=500_000, own_from=0.0,
    ),
}  # fmt: skip


class MtpRecipe(LayerRecipe[MtpPreset]):
    """How a head for multi-token prediction is trained."""

    method = "mtp"
    help = "train a head for multi-token prediction for a target"
    presets = MTP_PRESETS
    trainer = "paceline.train.mtp:MtpTrainer"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--levels", type=int, metavar="N", help="depths of the training-time test"
        )

    def chosen(self, args: Namespace) -> dict[str, dict[str, Any]]:
        return {**super().chosen(args), "--levels": given(levels=args.levels)}
