"""Prompt lookup: drafts the continuations of earlier matches of the text's suffix.

Matches are found in the text itself and in the earlier texts of its owner. Needs no weights and no
data of the verifier, and takes microseconds. It works best on text that repeats itself or others:
code, edits, quotes, tables, follow-up questions.
"""

from __future__ import annotations

from collections import OrderedDict
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
from paceline.drafter.methods.ngram.shared import SharedTexts
from paceline.drafter.methods.ngram.statistics import MatchStatistics
from paceline.drafter.methods.options import check_range, parse_options
from paceline.tree import TokenTree

_SHARED_SIZES = (2, 4)
"""n-grams in the index of an owner's texts."""


@dataclass(frozen=True)
class NgramOptions:
    """Options of ``ngram``."""

    max_n: int = 5
    """Longest n-gram in the index of a text. Unit: tokens."""

    min_n: int = 1
    """Shortest match in the text itself that drafts. Unit: tokens."""

    continuations: int = 4
    """Most matches of each source that a tree is merged from: the most recent of the longest."""

    match_limit: int = 32
    """Matches are measured up to this length. Unit: tokens."""

    min_survival: float = 0.05
    """Nodes less likely than this to be accepted are left out."""

    max_nodes: int = 32
    """Most nodes of a tree."""

    depth: int = 32
    """Longest path. Unit: tokens."""

    shared_tokens: int = 1 << 20
    """Tokens of ended texts that are kept for each owner, the newest; 0: none are."""

    owners: int = 16
    """Owners whose texts are kept: those who generated last."""

    def __post_init__(self) -> None:
        check_range("max_n", self.max_n, 1, 16)
        check_range("min_n", self.min_n, 1, self.max_n)
        check_range("continuations", self.continuations, 1, 64)
        check_range("match_limit", self.match_limit, self.max_n, 1024)
        check_range("min_survival", self.min_survival, 0.0, 1.0)
        check_range("max_nodes", self.max_nodes, 1, 255)
        check_range("depth", self.depth, 1, 255)
        check_range("shared_tokens", self.shared_tokens, 0, 1 << 28)
        check_range("owners", self.owners, 1, 1 << 16)


class Owner:
    """The ended texts of one owner, and how often matches in them and in a text continued."""

    def __init__(self, options: NgramOptions) -> None:
        kept = options.shared_tokens
        self.texts = SharedTexts(kept, _SHARED_SIZES) if kept else None
        self.in_text = MatchStatistics(options.match_limit)
        self.in_texts = MatchStatistics(options.match_limit)


class Continuation(NamedTuple):
    """Tokens that followed one or more matches."""

    tokens: tuple[int, ...]
    match: int
    """Length of the longest of these matches. Unit: tokens."""

    weight: int
    """Sum of the squared lengths of these matches."""

    statistics: MatchStatistics
    """Of the source of the longest match."""


class NgramSequence(DraftSequence):
    """The text of one generation and its index."""

    def __init__(self, options: NgramOptions, generation: Generation, owner: Owner) -> None:
        self._options = options
        self._shared = owner.texts
        self._index = NgramIndex(options.min_n, options.max_n)
        self._text = list(generation.tokens)
        self._in_text = MatchStatistics(options.match_limit, owner.in_text)
        self._in_texts = MatchStatistics(options.match_limit, owner.in_texts)
        self._predictions: list[Continuation] = []
        """The best continuation of each source in the last draft."""

    @property
    def backlog(self) -> int:
        return len(self._text) - len(self._index.tokens)

    def warm(self, limit: int) -> None:
        begin = len(self._index.tokens)
        self._index.append(self._text[begin : begin + limit])

    def extend(self, update: Update) -> None:
        for tokens, match, _, statistics in self._predictions:
            statistics.observe(match, tokens, update.tokens)
        self._predictions = []
        self._text.extend(update.tokens)

    def draft(self, budget: Budget) -> TokenTree:
        self.warm(self.backlog)
        options = self._options
        nodes = min(budget.nodes, options.max_nodes)
        depth = min(budget.depth, options.depth, nodes)
        found = self._continuations(self._index, self._in_text, depth)
        self._predictions = found[:1]
        if self._shared is not None:
            more = self._continuations(self._shared, self._in_texts, depth)
            self._predictions += more[:1]
            found += more
        root = _merge(found)
        return grow(root, _expand, nodes=nodes, depth=depth, min_survival=options.min_survival)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.add(self._text)
        self._index = NgramIndex(self._options.min_n, self._options.max_n)
        self._text.clear()

    def _continuations(
        self, source: NgramIndex | SharedTexts, statistics: MatchStatistics, depth: int
    ) -> list[Continuation]:
        options = self._options
        found = source.matches(
            self._text, limit=options.continuations, match_limit=options.match_limit
        )
        return [
            Continuation(source.continuation(position, depth), match, match * match, statistics)
            for position, match in found
        ]


def _merge(continuations: Iterable[Continuation]) -> Sequence[Continuation]:
    """Merges equal continuations, in order of appearance."""
    merged: dict[tuple[int, ...], Continuation] = {}
    for each in continuations:
        same = merged.get(each.tokens, each)
        weight = each.weight if same is each else each.weight + same.weight
        longest = each if each.match > same.match else same
        merged[each.tokens] = longest._replace(weight=weight)
    return list(merged.values())


def _expand(
    continuations: Sequence[Continuation], level: int
) -> Iterator[tuple[int, float, Sequence[Continuation]]]:
    """Children of a node on these continuations, which share the confidence by weight."""
    branches: dict[int, list[Continuation]] = {}
    total = 0
    for each in continuations:
        if level < len(each.tokens):
            branches.setdefault(each.tokens[level], []).append(each)
            total += each.weight
    for token, branch in branches.items():
        weight = sum(each.weight for each in branch)
        longest = max(branch, key=lambda each: each.match)
        confidence = longest.statistics.confidence(longest.match + level)
        yield token, confidence * weight / total, branch


class NgramDrafter(Drafter):
    """The method ``ngram``. Thread-safe."""

    method: ClassVar[str] = "ngram"
    inline = True

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._owners: OrderedDict[str, Owner] = OrderedDict()
        self.max_nodes = options.max_nodes
        self.max_depth = options.depth

    @classmethod
    def load(
        cls, folder: Path | None, options: Mapping[str, str], resources: Resources
    ) -> NgramDrafter:
        refuse_folder(cls.method, folder)
        return cls(parse_options(NgramOptions, options))

    def start(self, generation: Generation) -> NgramSequence:
        return NgramSequence(self._options, generation, self._owner(generation.owner))

    def _owner(self, name: str) -> Owner:
        """What is kept of an owner. Of a generation without one, nothing is."""
        owner = self._owners.pop(name, None) or Owner(self._options)
        if name:
            self._owners[name] = owner
        while len(self._owners) > self._options.owners:
            self._owners.popitem(last=False)
        return owner
