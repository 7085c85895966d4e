"""Prompt lookup: proposes the continuations of earlier matches of the text's suffix.

Matches are found in the text itself and in the earlier texts of its owner. Needs no weights and no
data of the verifier, and takes microseconds. It works best on text that repeats itself or others:
code, edits, quotes, tables, follow-up questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.checks import check_range
from paceline.sources.owners import Owners
from paceline.sources.ratio import Ratio
from paceline.tree import EMPTY, TokenTree, grow

_SEPARATOR = (1 << 32) - 1
"""After each text. No token id, so no match and no continuation crosses it."""

_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_LAST = (1 << 32) - 1  # positions are stored in 32 bits
_PRIOR_WEIGHT = 8.0  # weight of the prior, as a number of observations
_PRIORS = (0.0, 0.2, 0.45, 0.57, 0.66)
"""How often matches of so many tokens continue, where nothing is known: between what answers of a
model and Python sources gave. Longer ones of n tokens do with n / (n + 2)."""

_SHARED_SIZES = (2, 4)  # n-grams in the index of an owner's texts


class NgramIndex:
    """The positions after the n-grams of a text. O(1) time and memory per token.

    A map has the latest position after each n-gram, by a hash of it, and a link leads from each
    position to the previous ones with the same hashes. Several n-grams may share a hash, so
    :meth:`matches` compares tokens.
    """

    def __init__(self, text: Sequence[int], min_n: int, max_n: int) -> None:
        """Make an index of a text, which grows elsewhere, without any token of it."""
        self.length = 0  # tokens of the text that are in the index
        self._text = text
        self._min, self._max = min_n, max_n
        self._latest: dict[int, int] = {}
        self._earlier: list[tuple[int | None, ...]] = []
        self._keys: tuple[int, ...] = ()  # of the n-grams that end the text, by rising n

    def add(self, count: int) -> None:
        """Add the next ``count`` tokens of the text, or as many as there are."""
        latest, earlier = self._latest, self._earlier
        for position in range(self.length, min(self.length + count, len(self._text))):
            # The n-grams before a token are added only now that they have a continuation, so a
            # lookup of the newest n-gram never finds itself.
            keys = self._keys
            earlier.append(tuple(map(latest.get, keys)))
            latest.update(dict.fromkeys(keys, position))
            self.length = position + 1
            self._keys = self._hashes()

    def matches(
        self, text: Sequence[int], *, limit: int, match_limit: int, shortest: int = 1
    ) -> list[tuple[int, int]]:
        """Find positions preceded by the same tokens as the end of the text of the index.

        ``limit`` is the maximum of matches, and of positions compared for each n; ``match_limit``
        the longest match that is measured, ``shortest`` the shortest n-gram that is looked up.
        Returns (position of the continuation, length of the match) of each match, longer n-grams
        first, more recent positions first among equals.
        """
        lengths: dict[int, int] = {}
        for index in range(len(self._keys) - 1, max(0, shortest - self._min) - 1, -1):
            position = self._latest.get(self._keys[index])
            for _ in range(limit):
                if position is None:
                    break
                if position not in lengths:
                    length = self._match_length(position, match_limit)
                    if length >= self._min + index:
                        lengths[position] = length
                        if len(lengths) == limit:
                            return list(lengths.items())
                position = self._earlier[position][index]
        return list(lengths.items())

    def _hashes(self) -> tuple[int, ...]:
        """Return the hashes of the n-grams that end the indexed text."""
        keys, key = [], 0
        for token in reversed(self._text[max(0, self.length - self._max) : self.length]):
            key = hash((key, token))
            keys.append(key)
        return tuple(keys[self._min - 1 :])

    def continuation(self, position: int, length: int) -> tuple[int, ...]:
        """Return the text from a position on, repeated if it is shorter than ``length``."""
        tokens = list(self._text[position : min(position + length, self.length)])
        while len(tokens) < length:
            tokens += tokens[: length - len(tokens)]
        return tuple(tokens)

    def _match_length(self, position: int, limit: int) -> int:
        text, end = self._text, self.length
        limit = min(limit, position)
        length = 0
        while length < limit and text[position - 1 - length] == text[end - 1 - length]:
            length += 1
        return length


class SharedTexts:
    """A ring of the newest tokens of many texts, and the positions after their n-grams.

    For each n there is a table of the latest position by hash of an n-gram, and for each position a
    link to the previous one with the same hash, as in deflate (RFC 1951, section 4). Nothing is
    removed: positions that have left the ring are ignored. Several n-grams may share a hash, so
    :meth:`matches` compares tokens.

    Memory: 4 bytes a token and 8 for each n; pages are used as they are written.
    """

    def __init__(self, capacity: int, sizes: Sequence[int]) -> None:
        """``capacity`` in tokens is rounded up to a power of two; ``sizes`` n are increasing."""
        self._bits = max(1, (capacity - 1).bit_length())
        self._mask = (1 << self._bits) - 1
        self._sizes = tuple(sizes)
        self._clear()

    def _clear(self) -> None:
        self._end = 1  # position after the newest token; 0 stands for no position

        def zeros() -> NDArray[np.uint32]:
            return np.zeros(self._mask + 1, np.uint32)

        self._tokens = zeros()
        self._latest = [zeros() for _ in self._sizes]
        self._earlier = [zeros() for _ in self._sizes]
        # Reading one item of a view is much faster than of an array.
        self._token = self._tokens.data
        self._views = [(a.data, b.data) for a, b in zip(self._latest, self._earlier, strict=True)]

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text; of one beyond the capacity, its newest tokens."""
        text = np.array(tokens[-self._mask :], np.uint64)
        count = len(text)
        if self._end + count + 1 > _LAST:
            self._clear()
        places = self._end + np.arange(count + 1)
        slots = places & self._mask
        self._tokens[slots[:-1]] = text
        self._tokens[slots[-1]] = _SEPARATOR
        self._end += count + 1
        for n, latest, earlier in zip(self._sizes, self._latest, self._earlier, strict=True):
            earlier[slots] = 0
            if count <= n:
                continue
            keys = _hash((text[i : count - n + i] for i in range(n)), self._bits)
            order = np.argsort(keys, kind="stable")
            keys, after = keys[order], places[n:-1][order]
            repeated = keys[1:] == keys[:-1]
            before = latest[keys]
            before[1:][repeated] = after[:-1][repeated]
            earlier[after & self._mask] = before
            newest = np.append(~repeated, True)
            latest[keys[newest]] = after[newest]

    def matches(
        self, text: Sequence[int], *, limit: int, match_limit: int, shortest: int = 1
    ) -> list[tuple[int, int]]:
        """Find positions preceded by the same tokens as the end of a text.

        See :meth:`NgramIndex.matches`.
        """
        if self._end == 1:
            return []
        lengths: dict[int, int] = {}
        oldest = max(1, self._end - self._mask - 1)
        for n, (latest, earlier) in zip(reversed(self._sizes), reversed(self._views), strict=True):
            if not shortest <= n <= len(text):
                continue
            position = latest[_hash(text[-n:], self._bits)]
            for _ in range(limit):
                if position <= oldest:
                    break
                if position not in lengths:
                    max_length = min(match_limit, len(text), position - oldest)
                    length = self._match_length(text, position, max_length)
                    if length >= n:
                        lengths[position] = length
                        if len(lengths) == limit:
                            return list(lengths.items())
                position = earlier[position & self._mask]
        return list(lengths.items())

    def continuation(self, position: int, length: int) -> tuple[int, ...]:
        """Return at most ``length`` tokens from a position to the end of its text."""
        first, count = position & self._mask, min(length, self._end - position)
        tokens = self._token[first : first + count].tolist()
        tokens += self._token[: count - len(tokens)].tolist()  # around the end of the ring
        return tuple(tokens[: tokens.index(_SEPARATOR)] if _SEPARATOR in tokens else tokens)

    def _match_length(self, text: Sequence[int], position: int, max_length: int) -> int:
        token, mask = self._token, self._mask
        length = 0
        while length < max_length and token[(position - 1 - length) & mask] == text[-1 - length]:
            length += 1
        return length


def _hash(tokens: Iterable[Any], bits: int) -> Any:
    """Hash an n-gram to ``bits`` bits: of ints, or of uint64 arrays for many at once."""
    key: Any = 0
    for token in tokens:
        key = (key + token) * _FACTOR & _WORD
    return key >> (64 - bits)


class MatchStatistics:
    """How often matches of each length continued, in one text or in all texts of an owner.

    Texts differ in repetitiveness more than match lengths show, and so do owners. The prior of a
    text are its owner's texts, the prior of an owner is what is usual.
    """

    def __init__(self, max_match: int, prior: MatchStatistics | None = None) -> None:
        """Statistics of matches up to ``max_match`` tokens. Observations also update ``prior``."""
        self._max_match = max_match
        self._groups = [_group(length) for length in range(max_match + 1)]
        self._continued = [Ratio() for _ in range(self._groups[-1] + 1)]
        self._prior = prior

    def observe(self, match: int, predicted: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare the continuation of a match of ``match`` tokens with the text's."""
        for length, (expected, token) in enumerate(zip(predicted, tokens, strict=False), match):
            self._count(length, correct=expected == token)
            if expected != token:
                return

    def confidence(self, match: int) -> float:
        """Return the probability that a match of ``match`` tokens continues for one more."""
        prior = _usual(match) if self._prior is None else self._prior.confidence(match)
        group = self._groups[match if match <= self._max_match else self._max_match]
        return self._continued[group].value(prior, _PRIOR_WEIGHT)

    def _count(self, match: int, *, correct: bool) -> None:
        self._continued[self._groups[min(match, self._max_match)]].observe(right=correct)
        if self._prior is not None:
            self._prior._count(match, correct=correct)


def _usual(match: int) -> float:
    return _PRIORS[match] if match < len(_PRIORS) else match / (match + 2)


def _group(length: int) -> int:
    """Group of lengths that share their counts: each up to 4, then 5 to 8, 9 to 16, ..."""
    return length if length <= 4 else 2 + (length - 1).bit_length()


@dataclass(frozen=True)
class NgramOptions:
    """Options of the look-up."""

    max_n: int = 3
    """Longest n-gram in the index of a text. Up to 5, trees have 0.1% more accepted tokens, and
    take a tenth longer. Unit: tokens."""

    min_n: int = 1  # shortest match in the text itself that drafts, in tokens
    continuations: int = 4
    """Maximum matches of each source that a tree is merged from: the newest of the longest."""

    match_limit: int = 32  # matches are measured up to this length, in tokens
    min_survival: float = 0.05  # nodes less likely than this to be accepted are left out
    max_nodes: int = 32  # maximum number of nodes of a tree
    depth: int = 32  # maximum depth, in tokens
    shared_tokens: int = 1 << 20
    """Tokens of ended texts that are kept for each owner, the newest; 0: none are."""

    owners: int = 16  # owners whose texts are kept: those who generated last

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

    def __init__(self, options: NgramOptions, *, known: bool = True) -> None:
        """Begin without a text; of an owner who is not ``known``, none is kept."""
        kept = options.shared_tokens if known else 0
        self.texts = SharedTexts(kept, _SHARED_SIZES) if kept else None
        self.in_text = MatchStatistics(options.match_limit)
        self.in_texts = MatchStatistics(options.match_limit)


class Continuation(NamedTuple):
    """Tokens that followed one or more matches."""

    tokens: tuple[int, ...]
    match: int  # length of the longest of these matches, in tokens
    weight: int  # sum of the squared lengths of these matches
    statistics: MatchStatistics  # statistics of the source of the longest match


class NgramSource:
    """The text of one generation and its index."""

    def __init__(self, options: NgramOptions, text: Sequence[int], owner: Owner) -> None:
        """Begin with a text whose newest token is the anchor, and which grows elsewhere."""
        self._options = options
        self._shared = owner.texts
        self._text = text
        self._index = NgramIndex(text, options.min_n, options.max_n)
        self._in_text = MatchStatistics(options.match_limit, owner.in_text)
        self._in_texts = MatchStatistics(options.match_limit, owner.in_texts)
        self._predictions: list[Continuation] = []
        """The best continuation of each source in the last tree."""

    @property
    def backlog(self) -> int:
        """Tokens of the text that are not in the index. Unit: tokens."""
        return len(self._text) - self._index.length

    def warm(self, limit: int) -> None:
        """Add at most so many tokens of the backlog to the index."""
        self._index.add(limit)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens of a step, which the text has, how good the last tree was."""
        for predicted, match, _, statistics in self._predictions:
            statistics.observe(match, predicted, tokens)
        self._predictions = []

    def propose(
        self, nodes: int, depth: int, warm: int | None = None, min_survival: float = 0.0
    ) -> TokenTree:
        """Return a tree of at most so many nodes, none below ``depth``; empty without a match.

        At most ``warm`` tokens of the backlog enter the index, and the tree is empty if some are
        left; None: all of them do. Nodes less likely than ``min_survival`` are left out.
        """
        self.warm(self.backlog if warm is None else warm)
        if self.backlog:
            return EMPTY
        options = self._options
        nodes = min(nodes, options.max_nodes)
        depth = min(depth, options.depth, nodes)
        min_survival = max(min_survival, options.min_survival)
        continuations = self._continuations(self._index, self._in_text, depth, min_survival)
        self._predictions = continuations[:1]
        if self._shared is not None:
            more = self._continuations(self._shared, self._in_texts, depth, min_survival)
            self._predictions += more[:1]
            continuations += more
        if not continuations:
            return EMPTY
        root = _merge(continuations)
        if len(root) == 1:
            return _chain(root[0], min(nodes, depth), min_survival)
        return grow(
            root, _expand, nodes=nodes, depth=depth, min_survival=min_survival, source="ngram"
        )

    def close(self) -> None:
        """End the text; other texts of its owner may be continued from it."""
        if self._shared is not None:
            self._shared.add(self._text)
        self._text = ()
        self._index = NgramIndex((), self._options.min_n, self._options.max_n)

    def _continuations(
        self,
        source: NgramIndex | SharedTexts,
        statistics: MatchStatistics,
        depth: int,
        min_survival: float,
    ) -> list[Continuation]:
        """Return what followed the matches in a source; where none of it is likely enough, one
        token of the best match, which the statistics learn from. n-grams whose matches would not be
        likely enough are not looked up: most steps have a match of one token."""
        options, shortest = self._options, 1
        while shortest < options.max_n and statistics.confidence(shortest) < min_survival:
            shortest += 1
        matches = source.matches(
            self._text,
            limit=options.continuations,
            match_limit=options.match_limit,
            shortest=shortest,
        )
        if matches and all(statistics.confidence(match) < min_survival for _, match in matches):
            depth, matches = 1, matches[:1]
        return [
            Continuation(source.continuation(position, depth), match, match * match, statistics)
            for position, match in matches
        ]


class NgramOwners:
    """The stores of the owners who generated last."""

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._owners = Owners(options.owners, partial(Owner, options))

    def start(self, text: Sequence[int], owner: str) -> NgramSource:
        """Begin a text of an owner. Of a text without one (""), nothing is kept."""
        known = self._owners.of(owner) if owner else Owner(self._options, known=False)
        return NgramSource(self._options, text, known)


def _merge(continuations: Iterable[Continuation]) -> Sequence[Continuation]:
    """Merge equal continuations, in order of appearance."""
    merged: dict[tuple[int, ...], Continuation] = {}
    for continuation in continuations:
        same = merged.get(continuation.tokens, continuation)
        weight = continuation.weight if same is continuation else continuation.weight + same.weight
        longer = continuation if continuation.match > same.match else same
        merged[continuation.tokens] = longer._replace(weight=weight)
    return list(merged.values())


def _chain(only: Continuation, depth: int, min_survival: float) -> TokenTree:
    """Return the tree of one continuation, as :func:`grow` makes it, in a fifth of its time."""
    confidence, match = only.statistics.confidence, only.match
    confidences: list[float] = []
    survival = 1.0
    for level in range(min(depth, len(only.tokens))):
        chance = confidence(match + level)
        survival *= chance
        if survival < min_survival:
            break
        confidences.append(chance)
    return TokenTree.chain(only.tokens[: len(confidences)], confidences, source="ngram")


def _expand(
    continuations: Sequence[Continuation], level: int
) -> Iterator[tuple[int, float, Sequence[Continuation]]]:
    """Yield the children of a node on these continuations, which share the confidence by weight."""
    if len(continuations) == 1:  # most nodes: the rest would take five times as long
        [only] = continuations
        if level < len(only.tokens):
            yield only.tokens[level], only.statistics.confidence(only.match + level), continuations
        return
    branches: dict[int, list[Continuation]] = {}
    total = 0
    for continuation in continuations:
        if level < len(continuation.tokens):
            branches.setdefault(continuation.tokens[level], []).append(continuation)
            total += continuation.weight
    for token, branch in branches.items():
        weight = sum(continuation.weight for continuation in branch)
        longest = max(branch, key=lambda continuation: continuation.match)
        confidence = longest.statistics.confidence(longest.match + level)
        yield token, confidence * weight / total, branch
