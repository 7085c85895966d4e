"""Guesses under a grammar: tokens that it forces, and those that were chosen where it left as much.

Grammars allow the same tokens at many places: behind the name of a property, between two values,
in objects of the same form, and in other texts of the same schema. What was chosen there before,
behind the same token if that is known, is chosen again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.sources.owners import Owners
from paceline.tree import TokenTree

_LARGEST = 512
"""Places with more tokens than this are free text, which a grammar says nothing about."""

_PROBES = 4
"""Tokens of the free text seen last. A place that takes all of them but one is free text too: to
try them takes a twentieth of the time of finding all tokens that are allowed."""

_SURE = 0.98
"""Confidence of a token that is the only one allowed."""

_LEAST = 0.3
"""A path ends before a token that is less likely than this to be accepted, its path included."""

_PLACES = 8192
"""Places that are remembered of an owner, those seen last; some 200 bytes each."""

_MEMORY = 0.9
"""Weight of older observations of a place with each new one."""

_ANY = -1
"""Stands for the token before a place where it does not count."""

Place = tuple[int, int]
"""Hash of the tokens allowed there, and the token before it or :data:`_ANY`."""


class Constraint(Protocol):
    """The state of a grammar after the tokens of a text."""

    def allowed(self) -> NDArray[np.uint8]:
        """Tokens that may come next, 8 a byte, the lowest id in the lowest bit."""

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after the other."""

    def push(self, token: int) -> None:
        """Append a token that may come next."""

    def pop(self, tokens: int) -> None:
        """Remove the newest tokens."""


class Choice(NamedTuple):
    """What is known of a place."""

    token: int
    """The token chosen last."""

    right: float
    """How often the one chosen before was chosen again."""

    seen: float
    """Of how many times."""


_NEW = Choice(_ANY, 1.0, 2.0)


class GrammarPlaces:
    """What the texts of an owner chose at each place."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[Place, Choice] = OrderedDict()

    def note(self, tokens: int, before: int, token: int) -> None:
        """A token was chosen where ``tokens``, a hash, are allowed behind another token."""
        for place in ((tokens, before), (tokens, _ANY)):
            last, right, seen = self._chosen.pop(place, _NEW)
            again = last in (token, _ANY)
            self._chosen[place] = Choice(token, _MEMORY * right + again, _MEMORY * seen + 1.0)
        while len(self._chosen) > _PLACES:
            self._chosen.popitem(last=False)

    def find(self, tokens: int, before: int) -> Choice | None:
        """What is known of a place; None: nothing."""
        return self._chosen.get((tokens, before)) or self._chosen.get((tokens, _ANY))


class GrammarSource:
    """The guesses for one text."""

    def __init__(
        self,
        constraint: Constraint,
        stop_ids: Collection[int] = (),
        places: GrammarPlaces | None = None,
    ) -> None:
        """Begin at the anchor; no path goes on behind ``stop_ids``. ``places`` are those of the
        text's owner; None: nothing is known, and nothing is kept."""
        self._constraint = constraint
        self._stop_ids = stop_ids
        self._places = GrammarPlaces() if places is None else places
        self._last = _ANY
        self._probes: tuple[int, ...] = ()

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens of a step, which the constraint has taken."""
        self._constraint.pop(len(tokens))
        for token in tokens:
            allowed, count = self._few()
            if count > 1:
                self._places.note(hash(allowed), self._last, token)
            self._constraint.push(token)
            self._last = token

    def propose(self, depth: int) -> TokenTree:
        """A chain of at most so many tokens; empty where the grammar is open."""
        tokens: list[int] = []
        confidences: list[float] = []
        survival, last = 1.0, self._last
        try:
            while len(tokens) < depth and (found := self._next(last)) is not None:
                last, confidence = found
                survival *= confidence
                if survival < _LEAST or last in self._stop_ids:
                    break
                self._constraint.push(last)
                tokens.append(last)
                confidences.append(confidence)
        finally:
            self._constraint.pop(len(tokens))
        return TokenTree.chain(tokens, confidences, source="grammar")

    def _next(self, before: int) -> tuple[int, float] | None:
        """The likeliest token behind another one at the present place, and its confidence; None:
        nothing is known."""
        allowed, count = self._few()
        if count == 1:
            bits = int.from_bytes(allowed, "little")
            return bits.bit_length() - 1, _SURE
        known = self._places.find(hash(allowed), before) if count else None
        return None if known is None else (known.token, min(_SURE, known.right / known.seen))

    def _few(self) -> tuple[bytes, int]:
        """Tokens allowed at the present place, and how many they are; none: it is free text."""
        accepts = self._constraint.accepts
        if self._probes and sum([accepts((each,)) for each in self._probes]) >= _PROBES - 1:
            return b"", 0
        allowed = self._constraint.allowed()
        used = np.count_nonzero(allowed)  # of bytes, in a tenth of the time of all bits
        if used <= _LARGEST:
            bits = allowed.tobytes()
            count = int.from_bytes(bits, "little").bit_count()
            if count <= _LARGEST:
                return bits, count
        spread = np.flatnonzero(allowed)[[used * place // _PROBES for place in range(_PROBES)]]
        self._probes = tuple([8 * byte + _highest(allowed[byte]) for byte in spread.tolist()])
        return b"", 0


class GrammarOwners:
    """The places of the owners who generated last."""

    def __init__(self, owners: int = 8) -> None:
        self._owners = Owners(owners, GrammarPlaces)

    def start(
        self, constraint: Constraint, owner: str, stop_ids: Collection[int] = ()
    ) -> GrammarSource:
        """Begin a text of an owner. Of a text without one (""), nothing is kept."""
        return GrammarSource(constraint, stop_ids, self._owners.of(owner))


def _highest(bits: int) -> int:
    """The highest bit of a byte that is set."""
    return int(bits).bit_length() - 1
