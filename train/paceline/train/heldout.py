"""Accepted length on held-out texts, measured with the drafter itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from paceline.decoder import Decoder
from paceline.drafter.acceptance import accepted_lengths, replay
from paceline.drafter.recordings import Recording
from paceline.kernels.sampling import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.drafter_models import DrafterModel

TEXTS = 24
"""Most texts that are measured of a group."""

TOKENS = 128
"""Tokens that the target writes after a prompt."""

Rounds = dict[tuple[str, str], list[int]]
"""Drafted tokens accepted in each round, by group of texts and set of drafter options."""


class Heldout:
    """Texts of a target, replayed to measure how many drafted tokens it accepts."""

    def __init__(
        self,
        drafter: DrafterModel,
        decoder: Decoder,
        texts: Mapping[str, Sequence[Recording]],
        options: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Run the texts through the target, for the KV and hidden states that drafters read.

        Args:
            drafter: The drafter to measure.
            decoder: Its target.
            texts: Texts that the target wrote, by the name of their group.
            options: Sets of drafter options to measure with, by name; None: one, empty.
        """
        self._drafter, self._options = drafter, options or {"": {}}
        layers = drafter.hidden_state_layers
        self._texts = {
            group: [replay(decoder, t.prompt, t.tokens, t.sampling, layers) for t in part[:TEXTS]]
            for group, part in texts.items()
        }

    def measure(self, folder: Path | None = None) -> Rounds:
        """Measure the drafter in `folder`, or by default the drafter as it is now.

        Groups whose texts are too short for a round are left out.
        """
        if folder is None:
            with tempfile.TemporaryDirectory() as current:
                self._drafter.save(Path(current))
                return self.measure(Path(current))
        found: Rounds = {}
        for name, options in self._options.items():
            drafter = self._drafter.load_drafter(folder, options)
            for group, texts in self._texts.items():
                if rounds := [n for text in texts for n in accepted_lengths(drafter, text)]:
                    found[group, name] = rounds
            drafter.close()
        return found

    def log(self) -> dict[str, float]:
        """Mean accepted length of the drafter as it is now, in total as `heldout` and by group."""
        found = self.measure()
        by_group = {
            " ".join(["accepted", *filter(None, key)]): accepted_length(rounds)
            for key, rounds in found.items()
        }
        return {"heldout": accepted_length([*chain(*found.values())]), **by_group}


def accepted_length(rounds: Sequence[int]) -> float:
    """Mean number of tokens emitted per round, the bonus token included."""
    return 1 + sum(rounds) / max(1, len(rounds))


def write_groups(
    decoder: Decoder,
    splits: Mapping[str, Sequence[Sequence[int]]],
    lengths: Sequence[int] = (300,),
    count: int | None = None,
) -> dict[str, list[Recording]]:
    """Texts that a target writes after documents of each split, greedily and at temperature 1.

    `lengths` are of the prompts, in tokens; for `count` see :func:`write_after`.
    """
    return {
        f"{split}, prompts of {length:,}, temperature {heat:g}": write_after(
            decoder, documents, length, heat, count
        )
        for split, documents in splits.items()
        for length in lengths
        for heat in (0.0, 1.0)
    }


def write_after(
    decoder: Decoder,
    documents: Iterable[Sequence[int]],
    length: int,
    temperature: float,
    count: int | None = None,
) -> list[Recording]:
    """Let a target write after the first `length` tokens of documents that are longer.

    At most `count` texts are written, by default `TEXTS`; none if they would not fit the context of
    the target.
    """
    if not 0 < length <= decoder.config.max_position - TOKENS:
        return []
    prompts = [tuple(ids[:length]) for ids in documents if len(ids) > length][: count or TEXTS]
    tasks = [
        Task(prompt, SamplingParams(temperature=temperature, seed=seed), TOKENS)
        for seed, prompt in enumerate(prompts)
    ]
    return [
        Recording(prompts[number], tuple(tokens), temperature, number)
        for number, tokens in sorted(write_texts(decoder, tasks, None))
    ]
