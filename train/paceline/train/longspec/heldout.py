"""Accepted length on held-out text, measured with the drafter itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from torch import nn

from paceline.decoder import Decoder
from paceline.drafter.acceptance import Recording, accepted_lengths, record
from paceline.drafter.methods.base import Resources
from paceline.drafter.methods.longspec import LongSpecConfig, TargetRef, save_longspec
from paceline.drafter.methods.longspec.drafter import LongSpecDrafter
from paceline.v1 import sampling_pb2

Measured = Mapping[tuple[str, float], Sequence[int]]
"""Drafted tokens accepted in each round, by group of prompts and temperature."""

TEMPERATURES = (0.0, 1.0)
MAX_NODES = 36
WIDTHS = "12,16"  # the last holds for deeper levels; the likeliest MAX_NODES are kept
_WRITTEN = 128  # tokens after a prompt


class Heldout:
    """Texts by the target after prompts, and how much of them a layer guesses."""

    def __init__(
        self,
        target: Path,
        config: LongSpecConfig,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        levels: int,
    ) -> None:
        """Let the target write, which takes some milliseconds a token.

        `prompts` are token ids by group (a context length, say); a group is measured as one.
        """
        self._target, self._config, self._levels = target, config, levels
        self._ref = TargetRef.of(target)
        decoder = Decoder.load(target)
        self._texts: dict[tuple[str, float], list[Recording]] = {}
        for group, part in prompts.items():
            for heat in TEMPERATURES:
                how = [
                    sampling_pb2.SamplingParams(temperature=heat, seed=n) for n in range(len(part))
                ]
                self._texts[group, heat] = [
                    record(decoder, prompt, _WRITTEN, params)
                    for prompt, params in zip(part, how, strict=True)
                ]

    def measure(self, model: nn.Module) -> Measured:
        """What is accepted of a layer's trees."""
        with tempfile.TemporaryDirectory() as folder:
            save_longspec(folder, self._config, model.state_dict(), self._ref, levels=self._levels)
            options = {
                "target": str(self._target),
                "widths": WIDTHS,
                "depth": str(self._levels),
                "max_nodes": str(MAX_NODES),
            }
            drafter = LongSpecDrafter.load(Path(folder), options, Resources())
        return {
            key: [found for text in texts for found in accepted_lengths(drafter, text)]
            for key, texts in self._texts.items()
        }

    def mean(self, model: nn.Module) -> float:
        """Mean accepted length of all rounds, the verifier's own token included. Unit: tokens."""
        measured = self.measure(model).values()
        return 1 + mean(found for part in measured for found in part)


def prompts_of(
    documents: Sequence[Sequence[int]], lengths: Sequence[int], context: int
) -> dict[str, list[list[int]]]:
    """The first so many tokens of each document that has more, by length.

    Lengths that leave no room in a context of `context` tokens are left out.
    """
    fitting = [length for length in lengths if 0 < length <= context - _WRITTEN]
    found = {str(n): [list(ids[:n]) for ids in documents if len(ids) > n] for n in fitting}
    return {name: part for name, part in found.items() if part}


def _sampled(temperature: float, seed: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=temperature, seed=seed)
