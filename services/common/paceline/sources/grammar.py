"""Guesses under a grammar: tokens that it forces, and those that were chosen where it left as much.

A grammar with objects of the same form allows the same tokens at the same places of each: names of
properties, punctuation and white space between them. What was chosen there before is chosen again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.tree import TokenTree

_LARGEST = 512
"""Places with more tokens than this are free text, which a grammar says nothing about."""

_SURE = 0.98
"""Confidence of a token that is the only one allowed."""

_LEAST = 0.3
"""A path ends before a token that is less likely than this to be accepted, its path included."""

_PLACES = 4096
"""Places that are remembered: those seen last."""


class Constraint(Protocol):
    """The state of a grammar after the tokens of a text."""

    def allowed(self) -> NDArray[np.uint8]:
        """Tokens that may come next, 8 a byte, the lowest id in the lowest bit."""

    def push(self, token: int) -> None:
        """Append a token that may come next."""

    def pop(self, tokens: int) -> None:
        """Remove the newest tokens."""


class GrammarSource:
    """What one text chose at each place of its grammar, told apart by the tokens allowed there."""

    def __init__(self, constraint: Constraint, stop_ids: Collection[int] = ()) -> None:
        """Begin at the anchor; no path goes on behind ``stop_ids``."""
        self._constraint = constraint
        self._stop_ids = stop_ids
        self._chosen: OrderedDict[int, tuple[int, float, float]] = OrderedDict()
        """By place the token chosen last, how often such a guess was right, and of how many."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens of a step, which the constraint has taken."""
        self._constraint.pop(len(tokens))
        for token in tokens:
            allowed = self._constraint.allowed().tobytes()
            place = hash(allowed)
            if 1 < _count(allowed) <= _LARGEST:
                before, right, tried = self._chosen.pop(place, (token, 1.0, 2.0))
                self._chosen[place] = token, right + (before == token), tried + 1.0
            self._constraint.push(token)
        while len(self._chosen) > _PLACES:
            self._chosen.popitem(last=False)

    def propose(self, depth: int) -> TokenTree:
        """A chain of at most so many tokens; empty where the grammar is open."""
        tokens: list[int] = []
        confidences: list[float] = []
        survival = 1.0
        try:
            while len(tokens) < depth and (found := self._next()) is not None:
                token, confidence = found
                survival *= confidence
                if survival < _LEAST or token in self._stop_ids:
                    break
                self._constraint.push(token)
                tokens.append(token)
                confidences.append(confidence)
        finally:
            self._constraint.pop(len(tokens))
        return TokenTree.chain(tokens, confidences, source="grammar")

    def _next(self) -> tuple[int, float] | None:
        """The likeliest token at the present place, and its confidence; None: nothing is known."""
        allowed = self._constraint.allowed().tobytes()
        if _count(allowed) == 1:
            return _first(allowed), _SURE
        known = self._chosen.get(hash(allowed))
        if known is None:
            return None
        token, right, tried = known
        return token, min(_SURE, right / tried)


def _count(allowed: bytes) -> int:
    return int.from_bytes(allowed, "little").bit_count()


def _first(allowed: bytes) -> int:
    bits = int.from_bytes(allowed, "little")
    return (bits & -bits).bit_length() - 1
