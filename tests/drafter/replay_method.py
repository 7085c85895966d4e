"""The method ``replay``: chains of a recorded continuation, each token right with a probability."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.drafter import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    Resources,
    TokenTree,
    Update,
)
from paceline.drafter.methods.base import parse_options


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``replay``: the probability, and the most nodes of a chain."""

    p: float = 0.8
    max_nodes: int = 8


class ReplaySequence(DraftSequence):
    """A generation of a recorded text."""

    def __init__(self, drafter: ReplayDrafter, generation: GenerationInfo) -> None:
        self._drafter = drafter
        self._vocab_size = generation.vocab_size
        prompt = tuple(generation.tokens[: generation.prompt_length])
        self._record = drafter.records.get(prompt, ())
        self._emitted = len(generation.tokens) - len(prompt)

    def extend(self, update: Update) -> None:
        self._emitted += len(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        nodes = min(budget.nodes, budget.depth, self._drafter.max_nodes)
        tokens = list(self._record[self._emitted : self._emitted + nodes])
        for level in range(len(tokens)):
            if random.Random(self._emitted + level).random() >= self._drafter.p:
                tokens[level] = (tokens[level] + 1) % self._vocab_size
        return TokenTree.chain(tokens)


class ReplayDrafter(Drafter):
    """Needs a file with a line of JSON for each text: its prompt and its tokens."""

    method: ClassVar[str] = "replay"

    def __init__(
        self, options: ReplayOptions, records: Mapping[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        self.p, self.max_nodes, self.records = options.p, options.max_nodes, records

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> ReplayDrafter:
        assert folder is not None
        records = {}
        for line in folder.read_text().splitlines():
            text = json.loads(line)
            records[tuple(text["prompt"])] = tuple(text["tokens"])
        return cls(parse_options(ReplayOptions, options), records)

    def start(self, generation: GenerationInfo) -> ReplaySequence:
        return ReplaySequence(self, generation)


METHODS = {"replay": f"{__name__}:ReplayDrafter"}
