"""The method ``replay``, which drafts recorded continuations: for benchmarks and tests.

Each level contains the recorded token with a chosen probability, so the system can be measured
apart from any model. For texts without a recording the trees are empty. A process finds it through
:func:`paceline.bench.plugins.register`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    GenerationInfo,
    LoadError,
    Resources,
    Update,
    check_range,
    parse_options,
)
from paceline.drafter.recordings import read_recordings
from paceline.tree import EMPTY, TokenTree

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``replay``."""

    p: float = 0.8
    """Probability at each level that the recorded token is drafted."""

    max_nodes: int = 8
    """Maximum number of nodes of a tree."""

    width: int = 1
    """Nodes of a level: 1 drafts a chain; more add wrong tokens."""

    seed: int = 0
    """Seed of the draws. Equal seeds give equal trees for the same text."""

    level_ms: float = 0.0
    """Time that a level takes, as if on a processor of its own: the drafter sleeps. A chain can be
    drafted ahead then. Unit: milliseconds."""

    def __post_init__(self) -> None:
        check_range("p", self.p, 0.0, 1.0)
        check_range("max_nodes", self.max_nodes, 1, 255)
        check_range("width", self.width, 1, self.max_nodes)
        check_range("level_ms", self.level_ms, 0.0, 1e4)


METHODS = {"replay": "paceline.bench.replay_method:ReplayDrafter"}
"""For :func:`paceline.bench.plugins.register`."""

Records = Mapping[tuple[int, ...], tuple[int, ...]]
"""Recorded continuations by prompt."""


def read_records(path: Path) -> Records:
    """Reads recorded continuations (:func:`paceline.drafter.recordings.read_recordings`).

    Raises:
        LoadError: A file cannot be read or a line has another form.
    """
    return {each.prompt: each.tokens for each in read_recordings(path)}


class ReplaySequence(DraftSequence):
    """A generation, as far as it agrees with its recording."""

    def __init__(
        self, options: ReplayOptions, records: Records, generation: GenerationInfo
    ) -> None:
        self._options = options
        self._vocab_size = generation.vocab_size
        prompt = tuple(generation.tokens[: generation.prompt_length])
        self._record = records.get(prompt, ())
        self._emitted = 0
        self._levels = self._ahead = 0  # of the newest tree, and beyond it
        self._follow(generation.tokens[generation.prompt_length :])

    def extend(self, update: Update) -> None:
        if update.tokens:
            ends = range(self._emitted, self._emitted + self._levels + 1)
            hit = len(update.tokens) == len(ends) and all(map(self._right, ends))
            self._ahead = max(0, self._ahead - 1) if hit else 0
            self._levels = 0
        self._follow(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        options = self._options
        nodes = min(budget.nodes, options.max_nodes)
        levels = min(budget.depth, len(self._record) - self._emitted, -(-nodes // options.width))
        if levels <= 0:
            return EMPTY
        self._sleep(max(0, levels - self._ahead))
        self._levels, self._ahead = levels, 0
        tokens: list[int] = []
        parents: list[int] = []
        main = -1
        for level in range(levels):
            at = self._emitted + level
            draw, right = _mix(options.seed, at), self._right(at)
            width = min(options.width, nodes - len(tokens), max(1, self._vocab_size - 1))
            level_start = len(tokens)
            # Wrong tokens step through all other ids, so none repeats or equals the recorded one.
            for child in range(width):
                wrong = 1 + (draw + child) % max(1, self._vocab_size - 1)
                shift = 0 if right and child == 0 else wrong
                tokens.append((self._record[at] + shift) % self._vocab_size)
                parents.append(main)
            main = level_start
        return TokenTree(tuple(tokens), tuple(parents))

    def draft_ahead(self) -> bool:
        """Drafts a level beyond the newest tree. Returns whether there is another."""
        options = self._options
        if options.width > 1 or not 0 < self._levels + self._ahead <= 2 * options.max_nodes:
            return False
        self._sleep(1)
        self._ahead += 1
        return True

    def _right(self, at: int) -> bool:
        """Whether the recorded token is drafted at a position of the output."""
        return _mix(self._options.seed, at) < self._options.p * (1 << 64)

    def _sleep(self, levels: int) -> None:
        if self._options.level_ms:
            time.sleep(levels * self._options.level_ms / 1000)

    def _follow(self, tokens: Sequence[int]) -> None:
        end = self._emitted + len(tokens)
        if self._record[self._emitted : end] != tuple(tokens):
            self._record = ()  # the text differs from the recording
        self._emitted = end


class ReplayDrafter(Drafter):
    """The method ``replay``. Thread-safe."""

    method: ClassVar[str] = "replay"

    def __init__(self, options: ReplayOptions, records: Records) -> None:
        self._options = options
        self._records = records
        self.max_nodes = options.max_nodes

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> ReplayDrafter:
        if folder is None:
            raise LoadError("FOLDER_MISSING", "replay needs a recording: replay:FILE.jsonl")
        return cls(parse_options(ReplayOptions, options), read_records(folder))

    def start(self, generation: GenerationInfo) -> ReplaySequence:
        return ReplaySequence(self._options, self._records, generation)

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        return [each for each in cast(Sequence[ReplaySequence], sequences) if each.draft_ahead()]


def _mix(seed: int, position: int) -> int:
    """Hashes (seed, position) to 64 bits with the finaliser of SplitMix64."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
