"""Prompt lookup: drafts the continuations of earlier matches of the text's suffix.

Needs no weights and no data of the verifier, and takes microseconds. It works best on text that
repeats itself: code, edits, quotes, tables.
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
from paceline.drafter.methods.ngram.index import NgramIndex
from paceline.drafter.methods.options import check_range, parse_options
from paceline.tree import TokenTree


@dataclass(frozen=True)
class NgramOptions:
    """Options of ``ngram``."""

    max_n: int = 5
    """Longest n-gram in the index. Unit: tokens."""

    min_n: int = 2
    """Shortest match that drafts. Unit: tokens."""

    continuations: int = 4
    """Most matches that a tree is merged from: the most recent of the longest."""

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
    """Prior probability that a match of ``match`` tokens continues: ``match / (match + 1)``.

    This is the rule of succession, not a measurement. Its product over a path telescopes: a match
    of n tokens continues for k more with probability n / (n + k). So a longer match drafts a longer
    continuation, at most ``n * (1 / min_survival - 1)`` tokens.
    """
    return match / (match + 1)


_PRIOR_WEIGHT = 8.0
"""Weight of the prior, as a number of observations."""


class MatchStatistics:
    """How often matches of each length continued in this text so far.

    Texts differ in repetitiveness more than match lengths show. So every token of the text is also
    predicted by prompt lookup, and :func:`step_confidence` is only the prior of these observations.
    """

    def __init__(self, longest: int) -> None:
        self._groups = [_group(length) for length in range(longest + 1)]
        self._correct = [0] * (self._groups[-1] + 1)
        self._total = [0] * (self._groups[-1] + 1)

    def observe(self, match: int, *, correct: bool) -> None:
        """Counts a prediction from a match of ``match`` tokens."""
        group = self._groups[min(match, len(self._groups) - 1)]
        self._correct[group] += correct
        self._total[group] += 1

    def confidence(self, match: int) -> float:
        """Returns the probability that a match of ``match`` tokens continues for one more."""
        group = self._groups[min(match, len(self._groups) - 1)]
        prior = _PRIOR_WEIGHT * step_confidence(match)
        return (self._correct[group] + prior) / (self._total[group] + _PRIOR_WEIGHT)


def _group(length: int) -> int:
    """Group of lengths that share their counts: each up to 4, then 5 to 8, 9 to 16, ..."""
    return length if length <= 4 else 2 + (length - 1).bit_length()


class NgramSequence(DraftSequence):
    """The text of one generation and its index."""

    def __init__(self, options: NgramOptions, generation: Generation) -> None:
        self._options = options
        self._index = NgramIndex(options.min_n, options.max_n)
        self._text = list(generation.tokens)
        self._statistics = MatchStatistics(options.match_limit)
        self._position, self._match = -1, 0
        """Newest match: position of its continuation, -1 for none, and its length."""

    @property
    def backlog(self) -> int:
        return len(self._text) - len(self._index.tokens)

    def warm(self, limit: int) -> None:
        begin = len(self._index.tokens)
        for token in self._text[begin : begin + limit]:
            self._append(token)

    def extend(self, update: Update) -> None:
        self._text.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        self.warm(self.backlog)
        options = self._options
        matches = self._index.matches(limit=options.continuations, match_limit=options.match_limit)
        nodes = min(budget.nodes, options.max_nodes)
        depth = min(budget.depth, options.depth)
        root = _merge(
            Continuation(self._index.continuation(position, depth), match, match * match)
            for position, match in matches
        )
        return grow(root, self._expand, nodes=nodes, depth=depth, min_survival=options.min_survival)

    def close(self) -> None:
        self._index = NgramIndex(self._options.min_n, self._options.max_n)
        self._text.clear()

    def _append(self, token: int) -> None:
        """Appends a token, and observes whether the newest match predicted it."""
        index = self._index
        correct = self._position >= 0 and index.tokens[self._position] == token
        if self._position >= 0:
            self._statistics.observe(self._match, correct=correct)
        index.append((token,))
        if correct:
            self._position, self._match = self._position + 1, self._match + 1
        else:
            found = index.matches(limit=1, match_limit=self._options.match_limit)
            self._position, self._match = found[0] if found else (-1, 0)

    def _expand(
        self, continuations: Sequence[Continuation], level: int
    ) -> Iterator[tuple[int, float, Sequence[Continuation]]]:
        """Children of a node on these continuations, which share the confidence by weight."""
        confidence = self._statistics.confidence
        if len(continuations) == 1:
            (only,) = continuations
            yield only.tokens[level], confidence(only.match + level), continuations
            return
        branches: dict[int, list[Continuation]] = {}
        for each in continuations:
            branches.setdefault(each.tokens[level], []).append(each)
        total = sum(each.weight for each in continuations)
        for token, branch in branches.items():
            share = sum(each.weight for each in branch) / total
            yield token, share * confidence(max(c.match for c in branch) + level), branch


class Continuation(NamedTuple):
    """Tokens that followed one or more matches."""

    tokens: tuple[int, ...]
    match: int
    """Length of the longest of these matches. Unit: tokens."""

    weight: int
    """Sum of the squared lengths of these matches."""


def _merge(continuations: Iterable[Continuation]) -> Sequence[Continuation]:
    """Merges equal continuations, in order of appearance."""
    merged: dict[tuple[int, ...], Continuation] = {}
    for tokens, match, weight in continuations:
        same = merged.get(tokens, Continuation(tokens, 0, 0))
        merged[tokens] = Continuation(tokens, max(match, same.match), weight + same.weight)
    return list(merged.values())


class NgramDrafter(Drafter):
    """The method ``ngram``. Thread-safe."""

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
