"""Texts of one owner that ended, with an index of their n-grams, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SEPARATOR = (1 << 32) - 1
"""After each text. No token id, so no match and no continuation crosses it."""

_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_LAST = (1 << 32) - 1  # positions are stored in 32 bits


class SharedTexts:
    """A ring of the newest tokens of many texts, and the positions after their n-grams.

    For each n there is a table of the latest position by hash of an n-gram, and for each position a
    link to the previous one with the same hash, as in deflate (RFC 1951, section 4). Nothing is
    removed: positions that have left the ring are ignored. Several n-grams may share a hash, so
    :meth:`matches` compares tokens.

    Memory: 4 bytes a token and 8 for each n; pages are used as they are written.
    """

    def __init__(self, capacity: int, sizes: Sequence[int]) -> None:
        """Of a capacity in tokens, rounded up to a power of two, and increasing sizes n."""
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

    @property
    def byte_size(self) -> int:
        """Most memory that it uses. Unit: bytes."""
        return sum(a.nbytes for a in (self._tokens, *self._latest, *self._earlier))

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a text; of one beyond the capacity, its newest tokens."""
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
        self, text: Sequence[int], *, limit: int, match_limit: int
    ) -> list[tuple[int, int]]:
        """Finds positions preceded by the same tokens as the end of a text.

        See :meth:`NgramIndex.matches`.
        """
        found: dict[int, int] = {}
        oldest = max(1, self._end - self._mask - 1)
        for n, (latest, earlier) in zip(reversed(self._sizes), reversed(self._views), strict=True):
            if len(text) < n:
                continue
            position = latest[_hash(text[-n:], self._bits)]
            for _ in range(limit):
                if position <= oldest:
                    break
                if position not in found:
                    most = min(match_limit, len(text), position - oldest)
                    length = self._match_length(text, position, most)
                    if length >= n:
                        found[position] = length
                        if len(found) == limit:
                            return list(found.items())
                position = earlier[position & self._mask]
        return list(found.items())

    def continuation(self, position: int, length: int) -> tuple[int, ...]:
        """Returns at most ``length`` tokens from a position to the end of its text."""
        token, mask = self._token, self._mask
        stop = min(position + length, self._end)
        found = [token[at & mask] for at in range(position, stop)]
        return tuple(found[: found.index(_SEPARATOR)] if _SEPARATOR in found else found)

    def _match_length(self, text: Sequence[int], position: int, most: int) -> int:
        token, mask = self._token, self._mask
        length = 0
        while length < most and token[(position - 1 - length) & mask] == text[-1 - length]:
            length += 1
        return length


def _hash(tokens: Iterable[Any], bits: int) -> Any:
    """Hash of an n-gram in ``bits`` bits: of ints, or of uint64 arrays for many at once."""
    key: Any = 0
    for token in tokens:
        key = (key + token) * _FACTOR & _WORD
    return key >> (64 - bits)
