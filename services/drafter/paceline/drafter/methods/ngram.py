"""Prompt lookup: the text goes on as it went on before (longest suffix match).

Needs no weights and no verifier data, costs microseconds, and shines where text repeats itself:
code, edits, quotes, tables, loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

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
from paceline.drafter.tree import Tree


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

    min_survival: float = 0.05
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


_DOUBT = 8.0
"""Guesses that the rule counts for."""


class Record:
    """What matches of each length were worth in this text so far.

    Whether a text repeats itself differs from text to text more than match lengths tell. So every
    token of the text is guessed as prompt lookup would have, and the rule of
    :func:`step_confidence` counts for no more than a few of these guesses.
    """

    def __init__(self, longest: int) -> None:
        self._groups = [_group(length) for length in range(longest + 1)]
        self._right = [0] * (self._groups[-1] + 1)
        self._all = [0] * (self._groups[-1] + 1)

    def learn(self, match: int, *, right: bool) -> None:
        """A match of so many tokens went on rightly, or did not."""
        group = self._groups[min(match, len(self._groups) - 1)]
        self._right[group] += right
        self._all[group] += 1

    def confidence(self, match: int) -> float:
        """Chance that a match of so many tokens goes on for one more."""
        group = self._groups[min(match, len(self._groups) - 1)]
        right, every = self._right[group], self._all[group]
        return (right + _DOUBT * step_confidence(match)) / (every + _DOUBT)


def _group(length: int) -> int:
    """Lengths that are taken for alike: each up to 4, then 5 to 8, 9 to 16, ..."""
    return length if length <= 4 else 2 + (length - 1).bit_length()


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

    def continuation(self, place: int, length: int) -> tuple[int, ...]:
        """The text from a place on; beyond its end it repeats itself, as a periodic text would."""
        tokens = self.tokens[place : place + length]
        while len(tokens) < length:
            tokens += tokens[: length - len(tokens)]
        return tuple(tokens)

    def _match_length(self, place: int, limit: int) -> int:
        text = self.tokens
        end = len(text)
        limit = min(limit, place)
        length = 0
        while length < limit and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        return length


class NgramSequence(DraftSequence):
    """The text of one generation and its index."""

    def __init__(self, options: NgramOptions, generation: Generation) -> None:
        self._options = options
        self._index = NgramIndex(options.min_n, options.max_n)
        self._text = list(generation.tokens)
        self._record = Record(options.match_limit)
        self._place, self._match = -1, 0

    @property
    def backlog(self) -> int:
        return len(self._text) - len(self._index.tokens)

    def warm(self, limit: int) -> None:
        begin = len(self._index.tokens)
        for token in self._text[begin : begin + limit]:
            self._guess(token)

    def extend(self, update: Update) -> None:
        self._text.extend(update.tokens)

    def draft(self, budget: Budget) -> Tree:
        self.warm(self.backlog)
        options = self._options
        matches = self._index.matches(places=options.continuations, match_limit=options.match_limit)
        nodes = min(budget.nodes, options.max_nodes)
        depth = min(budget.depth, options.depth)
        ways = _merge(
            Way(self._index.continuation(place, depth), match, match * match)
            for place, match in matches
        )
        return grow(ways, self._expand, nodes=nodes, depth=depth, min_survival=options.min_survival)

    def close(self) -> None:
        self._index = NgramIndex(self._options.min_n, self._options.max_n)
        self._text.clear()

    def _guess(self, token: int) -> None:
        """Take in a token, and note whether a lookup would have found it."""
        index = self._index
        right = self._place >= 0 and index.tokens[self._place] == token
        if self._place >= 0:
            self._record.learn(self._match, right=right)
        index.append((token,))
        if right:
            self._place, self._match = self._place + 1, self._match + 1
        else:
            found = index.matches(places=1, match_limit=self._options.match_limit)
            self._place, self._match = found[0] if found else (-1, 0)

    def _expand(
        self, ways: Sequence[Way], level: int
    ) -> Iterator[tuple[int, float, Sequence[Way]]]:
        """Children of a node that these ways lead through: they share the confidence by weight."""
        confidence = self._record.confidence
        if len(ways) == 1:
            yield ways[0].tokens[level], confidence(ways[0].match + level), ways
            return
        branches: dict[int, list[Way]] = {}
        for way in ways:
            branches.setdefault(way.tokens[level], []).append(way)
        total = sum(way.weight for way in ways)
        for token, through in branches.items():
            share = sum(way.weight for way in through) / total
            yield token, share * confidence(max(w.match for w in through) + level), through


class Way(NamedTuple):
    """A way the text may go on."""

    tokens: tuple[int, ...]
    match: int
    """Length of the longest match it followed. Unit: tokens."""

    weight: int
    """Sum, over the places where it followed, of the squared length of the match there."""


def _merge(ways: Iterable[Way]) -> Sequence[Way]:
    """The ways that differ, in order of appearance."""
    merged: dict[tuple[int, ...], Way] = {}
    for way in ways:
        same = merged.get(way.tokens)
        if same is not None:
            way = Way(way.tokens, max(way.match, same.match), way.weight + same.weight)
        merged[way.tokens] = way
    return list(merged.values())


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
