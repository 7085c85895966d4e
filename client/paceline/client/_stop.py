"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Returns text up to the first stop string that is complete.

    The stop string whose last character comes first ends the text; among those that end at the
    same character, the longest. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._buffer = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Adds a piece and returns the text that is final.

        The buffer keeps only text that may begin a stop string. After `matched` is set, the text
        has ended, and this returns nothing more.
        """
        if not self._stops or self.matched is not None:
            return piece if self.matched is None else ""
        text = self._buffer + piece
        found = [(start + len(s), -len(s), s) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            end, negative_length, self.matched = min(found)
            self._buffer = ""
            return text[: end + negative_length]
        keep = self._undecided(text)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The buffered text, when the generation has ended."""
        text, self._buffer = self._buffer, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
