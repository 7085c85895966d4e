"""The recipe of the method ``bigram``, in a module outside of the package: it counts pairs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.train.recipes.base import Recipe, given

if TYPE_CHECKING:
    from paceline.train.corpus import Corpus
    from paceline.train.run import Run


@dataclass(frozen=True)
class BigramPreset:
    """What is added to each count; all texts are read in one step."""

    smoothing: float = 1.0
    minutes: float = 1
    steps: int = 1


class BigramRecipe(Recipe[BigramPreset]):
    """Logits are the logarithms of counts."""

    method = "bigram"
    help = "count which token follows which"
    presets = {"cpu": BigramPreset()}  # noqa: RUF012 - as in the recipes of the package

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--smoothing", type=float, metavar="S", help="added to each count")

    def vary(self, preset: BigramPreset, args: Namespace) -> BigramPreset:
        return replace(preset, **given(smoothing=args.smoothing))

    def train(self, args: Namespace, preset: BigramPreset, corpus: Corpus, run: Run) -> None:
        import torch
        from bigram_method import write_bigram

        from paceline.convert import weights_fingerprint
        from paceline.train.corpus import encode_all, load_tokenizer
        from paceline.train.run import begin_run, cleared

        begin_run(run, args.out, self.method, preset, corpus, target=args.target)
        tokenizer = load_tokenizer(args.target)
        counts = torch.full((len(tokenizer), len(tokenizer)), preset.smoothing)
        for ids in encode_all(tokenizer, corpus.train):
            for first, second in pairwise(ids):
                counts[first, second] += 1
        fingerprint = weights_fingerprint(args.target)
        write_bigram(
            cleared(args.out), len(tokenizer), counts.log(), target_fingerprint=fingerprint
        )
