"""Prompt lookup: the text goes on as it went on before (longest suffix match).

Needs no weights and no verifier data, costs microseconds, and shines where text repeats itself:
code, edits, quotes, tables, loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.drafter.builders import grow
from paceline.drafter.methods.base import (
    Budget,
    Drafter,
    DraftSequence,
    Generation,
    Resources,
    Update,
    refuse_folder,
)
from paceline.drafter.methods.options import check_range, parse_options
from paceline.drafter.tree import EMPTY, Tree


@dataclass(frozen=True)
class NgramOptions:
    """Settings of ``ngram``."""

    max_n: int = 5
    """Longest n-gram in the index. Unit: tokens."""

    min_n: int = 2
    """Shortest match that drafts. Unit: tokens."""

    continuations: int = 4
    """Most earlier places a tree is merged from: the most recent of the longest matches."""

    match_limit: int = 32
    """Matches are measured up to this length. Unit: tokens."""

    min_survival: float = 0.2
    """Nodes less likely than this to be accepted are left out; see :func:`step_confidence`."""

    max_nodes: int = 32
    """Most nodes of a tree."""

    depth: int = 32
    """Longest path. Unit: tokens."""

    def __post_init__(self) -> None:
        check_range("max_n", self.max_n, 1, 16)
        check_range("min_n", self.min_n, 1, self.max_n)
        check_range("continuations", self.continuations, 1, 64)
        check_range("match_limit", self.match_limit, self.max_n, 1024)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("max_nodes", self.max_nodes, 1, 255)
        check_range("depth", self.depth, 1, 255)


def step_confidence(match: int) -> float:
    """Chance that a match of ``match`` tokens goes on for one more: ``match / (match + 1)``.

    A plain rule (of succession), not a measurement. Over a path its product telescopes: a match of
    n tokens is believed to hold for k more with chance n / (n + k), so that a longer match drafts a
    longer continuation: at most ``n * (1 / min_survival - 1)`` tokens.
    """
    return match / (match + 1)


class NgramIndex:
    """Text, and where each of its n-grams last went on. O(1) time and memory per token.

    For each n there is a map from the hash of an n-gram to the latest position after it, and for
    each position the one before it with the same hash. A hash may stand for several n-grams:
    whoever follows the chain compares tokens.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(min_n, max_n + 1)
        self._latest: list[dict[int, int]] = [{} for _ in self._sizes]
        self._earlier: list[list[int]] = [[] for _ in self._sizes]

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        text = self.tokens
        for token in tokens:
            end = len(text)
            # The n-grams before `end` are only entered now that they have a continuation: a lookup
            # of the newest n-gram never finds itself.
            for n, latest, earlier in zip(self._sizes, self._latest, self._earlier, strict=True):
                if end < n:
                    earlier.append(-1)
                    continue
                key = hash(tuple(text[end - n : end]))
                earlier.append(latest.get(key, -1))
                latest[key] = end
            text.append(token)

    def matches(self, *, places: int, match_limit: int) -> list[tuple[int, int]]:
        """Earlier places that end like the text.

        Args:
            places: Most places looked at, for each length of n-gram too.
            match_limit: Longest match measured.

        Returns:
            (position of the continuation, length of the match) of at most ``places`` places, those
            of longer n-grams first, more recent ones first among equals.
        """
        text = self.tokens
        end = len(text)
        found: dict[int, int] = {}
        for index in range(len(self._sizes) - 1, -1, -1):
            n = self._sizes[index]
            if end < n:
                continue
            place = self._latest[index].get(hash(tuple(text[end - n :])), -1)
            for _ in range(places):
                if place < 0:
                    break
                if place not in found:
                    length = self._match_length(place, match_limit)
                    if length >= n:
                        found[place] = length
                        if len(found) == places:
                            return list(found.items())
                place = self._earlier[index][place]
        return list(found.items())

    def _match_length(self, place: int, limit: int) -> int:
        text = self.tokens
        end = len(text)
        length = 0
        while (
            length < limit and length < place and text[place - 1 - length] == text[end - 1 - length]
        ):
            length += 1
        return length


class NgramSequence(DraftSequence):
    """The text of one generation and its index."""

    def __init__(self, options: NgramOptions, generation: Generation) -> None:
        self._options = options
        self._index = NgramIndex(options.min_n, options.max_n)
        self._pending: list[int] = list(generation.tokens)

    @property
    def backlog(self) -> int:
        return len(self._pending)

    def warm(self, limit: int) -> None:
        self._index.append(self._pending[:limit])
        del self._pending[:limit]

    def extend(self, update: Update) -> None:
        self._pending.extend(update.tokens)

    def draft(self, budget: Budget) -> Tree:
        self.warm(len(self._pending))
        options = self._options
        matches = self._index.matches(places=options.continuations, match_limit=options.match_limit)
        if not matches:
            return EMPTY
        nodes = min(budget.nodes, options.max_nodes)
        depth = min(budget.depth, options.depth)
        text = self._index.tokens
        if len(matches) == 1:
            return _single(text, *matches[0], nodes, depth, options.min_survival)
        end = len(text)

        # The state of a node: the matches that went on through it.
        def expand(
            state: list[tuple[int, int]], level: int
        ) -> Iterator[tuple[int, float, list[tuple[int, int]]]]:
            ways: dict[int, list[tuple[int, int]]] = {}
            for match in state:
                # Beyond the newest token the continuation repeats itself: the text is periodic.
                place = match[0]
                ways.setdefault(text[place + level % (end - place)], []).append(match)
            total = sum(length * length for _, length in state)
            for token, through in ways.items():
                share = sum(length * length for _, length in through) / total
                longest = max(length for _, length in through)
                yield token, share * step_confidence(longest + level), through

        return grow(matches, expand, nodes=nodes, depth=depth, min_survival=options.min_survival)

    def close(self) -> None:
        self._index = NgramIndex(self._options.min_n, self._options.max_n)
        self._pending.clear()


def _single(
    text: Sequence[int], place: int, match: int, nodes: int, depth: int, min_survival: float
) -> Tree:
    """What :func:`grow` makes of a single match, without its heap."""
    period = len(text) - place
    length = 0
    while length < min(nodes, depth) and match / (match + length + 1) >= min_survival:
        length += 1
    tokens = tuple(text[place + step % period] for step in range(length))
    return Tree(
        tokens,
        tuple(range(-1, length - 1)),
        tuple(step_confidence(match + step) for step in range(length)),
    )


class NgramDrafter(Drafter):
    """The method ``ngram``: settings only. Safe from any thread."""

    method: ClassVar[str] = "ngram"
    inline: ClassVar[bool] = True

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self.max_nodes = options.max_nodes
        self.max_depth = options.depth

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> NgramDrafter:
        refuse_folder(cls.method, folder)
        return cls(parse_options(NgramOptions, options))

    def start(self, generation: Generation) -> NgramSequence:
        return NgramSequence(self._options, generation)
