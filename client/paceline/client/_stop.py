"""Stop strings, found in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string that completes.

    Of several stop strings the one whose last character comes first wins; of those that complete
    at the same character, the longest. How the text is cut into pieces does not matter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Takes the next piece; returns the text that is certain to stay.

        Held back is only what could still be the beginning of a stop string. Once `matched` is
        set, the text has ended: the stop string and everything after it are gone.
        """
        if not self._stops or self.matched is not None:
            return piece if self.matched is None else ""
        text = self._held + piece
        found = [(start + len(s), -len(s), s) for s in self._stops if (start := text.find(s)) >= 0]
        if found:
            end, negative_length, self.matched = min(found)
            self._held = ""
            return text[: end + negative_length]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text: the generation has ended otherwise, so no stop string will complete."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
