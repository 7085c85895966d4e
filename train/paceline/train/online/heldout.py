"""Accepted length on held-out texts, recorded ones and such as the drafter was made with."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from paceline.decoder import Decoder
from paceline.drafter.acceptance import accepted_lengths, replay
from paceline.drafter.recordings import Recording
from paceline.kernels.sampling import SamplingParams
from paceline.train.author import Task, write_texts
from paceline.train.trained import Trained

RECORDED, OLD = "recorded", "old"
"""Kinds of texts."""

_TEXTS = 24
"""Most texts of a kind that are measured on."""

_PROMPT, _WRITTEN = 300, 128  # tokens of an old text

Measured = dict[str, float]
"""Mean accepted length, bonus included, by kind of texts."""


class OnlineHeldout:
    """Texts that the target wrote, and how much of them a drafter guesses."""

    def __init__(
        self,
        trained: Trained,
        recorded: Sequence[Recording],
        documents: Sequence[Sequence[int]],
        stop: int,
    ) -> None:
        """Read `recorded` texts once more, and let the target write after held-out `documents`."""
        self._trained = trained
        decoder = Decoder.load(trained.target)
        with tempfile.TemporaryDirectory() as folder:
            trained.save(Path(folder))
            layers = trained.drafter(Path(folder)).needs.hidden_state_layers
        old = _written(decoder, documents, stop)
        self._texts = {
            kind: [replay(decoder, t.prompt, t.tokens, t.sampling, layers) for t in texts[:_TEXTS]]
            for kind, texts in ((RECORDED, recorded), (OLD, old))
        }

    def measure(self, folder: Path) -> Measured:
        """Of the drafter in `folder`, as it is without further options.

        Kinds whose texts are too short for a round are left out. Raises ValueError where these are
        the recorded ones.
        """
        drafter = self._trained.drafter(folder)
        rounds = {
            kind: [found for text in texts for found in accepted_lengths(drafter, text)]
            for kind, texts in self._texts.items()
        }
        if not rounds[RECORDED]:
            raise ValueError("the recorded texts are too short for a round: record longer ones")
        return {kind: 1 + mean(found) for kind, found in rounds.items() if found}

    def log(self) -> dict[str, float]:
        """Of the weights as they are: a row of a log."""
        with tempfile.TemporaryDirectory() as folder:
            self._trained.save(Path(folder))
            found = self.measure(Path(folder))
        return {"heldout": found[RECORDED], **found}


def _written(decoder: Decoder, documents: Sequence[Sequence[int]], stop: int) -> list[Recording]:
    """Texts after the beginnings of documents, greedy and at temperature 1."""
    prompts = [tuple(ids[:_PROMPT]) for ids in documents if len(ids) > _PROMPT][: _TEXTS // 2]
    tasks = [
        Task(prompt, SamplingParams(temperature=heat, seed=seed), _WRITTEN)
        for heat in (0.0, 1.0)
        for seed, prompt in enumerate(prompts)
    ]
    return [
        Recording(
            tuple(tasks[number].prompt),
            tuple(text),
            tasks[number].params.temperature,
            tasks[number].params.seed,
        )
        for number, text in sorted(write_texts(decoder, tasks, stop))
    ]
