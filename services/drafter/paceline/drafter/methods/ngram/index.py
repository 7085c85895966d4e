"""An index of the n-grams of a text."""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """A text and the positions after its n-grams. O(1) time and memory per token.

    For each n there is a map from the hash of an n-gram to the latest position after it, and for
    each position a link to the previous one with the same hash. Several n-grams may share a hash,
    so :meth:`matches` compares tokens.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(min_n, max_n + 1)
        self._latest: list[dict[int, int]] = [{} for _ in self._sizes]
        self._earlier: list[list[int]] = [[] for _ in self._sizes]

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        text = self.tokens
        for token in tokens:
            end = len(text)
            # The n-grams before `end` are added only now that they have a continuation, so a
            # lookup of the newest n-gram never finds itself.
            for n, latest, earlier in zip(self._sizes, self._latest, self._earlier, strict=True):
                if end < n:
                    earlier.append(-1)
                    continue
                key = hash(tuple(text[end - n : end]))
                earlier.append(latest.get(key, -1))
                latest[key] = end
            text.append(token)

    def matches(
        self, text: Sequence[int], *, limit: int, match_limit: int
    ) -> list[tuple[int, int]]:
        """Finds positions preceded by the same tokens as the end of a text.

        Args:
            text: The text of the index.
            limit: Most matches, and most positions compared for each n.
            match_limit: Longest match that is measured. Unit: tokens.

        Returns:
            (position of the continuation, length of the match) of each match, longer n-grams first,
            more recent positions first among equals.
        """
        end = len(text)
        found: dict[int, int] = {}
        for index in range(len(self._sizes) - 1, -1, -1):
            n = self._sizes[index]
            if end < n:
                continue
            position = self._latest[index].get(hash(tuple(text[end - n :])), -1)
            for _ in range(limit):
                if position < 0:
                    break
                if position not in found:
                    length = self._match_length(position, match_limit)
                    if length >= n:
                        found[position] = length
                        if len(found) == limit:
                            return list(found.items())
                position = self._earlier[index][position]
        return list(found.items())

    def continuation(self, position: int, length: int) -> tuple[int, ...]:
        """Returns the text from a position on, repeated if it is shorter than ``length``."""
        tokens = self.tokens[position : position + length]
        while len(tokens) < length:
            tokens += tokens[: length - len(tokens)]
        return tuple(tokens)

    def _match_length(self, position: int, limit: int) -> int:
        text = self.tokens
        end = len(text)
        limit = min(limit, position)
        length = 0
        while length < limit and text[position - 1 - length] == text[end - 1 - length]:
            length += 1
        return length
