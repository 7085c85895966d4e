"""Prompt lookup as a drafter; see :mod:`paceline.sources.ngram`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    Resources,
    Update,
    parse_options,
    refuse_folder,
)
from paceline.sources.ngram import NgramOptions, NgramOwners, NgramSource
from paceline.tree import TokenTree


class NgramSequence(DraftSequence):
    def __init__(self, text: list[int], source: NgramSource) -> None:
        self._text, self._source = text, source

    @property
    def backlog(self) -> int:
        return self._source.backlog

    def warm(self, limit: int) -> None:
        self._source.warm(limit)

    def extend(self, update: Update) -> None:
        self._text.extend(update.tokens)
        self._source.learn(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        return self._source.propose(budget.nodes, budget.depth)

    def close(self) -> None:
        self._source.close()


class NgramDrafter(Drafter):
    """The method ``ngram``. Thread-safe."""

    method: ClassVar[str] = "ngram"
    label: ClassVar[str] = "prompt look-up"

    def __init__(self, options: NgramOptions) -> None:
        self._owners = NgramOwners(options)
        self.max_nodes = options.max_nodes
        self.max_depth = options.depth

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> NgramDrafter:
        refuse_folder(cls.method, folder)
        return cls(parse_options(NgramOptions, options))

    def start(self, generation: GenerationInfo) -> NgramSequence:
        text = list(generation.tokens)
        return NgramSequence(text, self._owners.start(text, generation.owner))
