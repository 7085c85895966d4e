"""Guesses under a grammar: tokens that it forces, and those that were chosen where it left as much.

Grammars allow the same tokens at many places: behind the name of a property, between two values,
in objects of the same form, and in other texts of the same schema. What was chosen there before,
behind the same token if that is known, is chosen again.

White space and punctuation are chosen by the form of a text, whatever its words are: line breaks
behind a comma, a blank behind a colon. They are known from the first place where the same
punctuation is allowed behind the same character, and indentations relative to the line before.
"""

from __future__ import annotations

import string
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.sources.owners import Owners
from paceline.sources.ratio import Ratio
from paceline.tree import TokenTree

_MAX_CHOICES = 512
"""Places with more tokens than this are free text, which a grammar says nothing about."""

_PROBES = 4
"""Tokens of the free text seen last. A place that takes all of them but one is free text too: to
try them takes a twentieth of the time of finding all tokens that are allowed."""

_SURE = 0.98  # confidence of a token that is the only one allowed
_MIN_SURVIVAL = 0.3
"""A path ends before a token that is less likely than this to be accepted, its path included."""

_PLACES = 8192  # places that are remembered of an owner, those seen last; some 200 bytes each
_MEMORY = 0.9  # weight of older observations of a place with each new one
_ANY = -1  # stands for the token before a place where it does not count
Place = tuple[str, int, int]
""""tokens", hash of the tokens allowed there, and the token before it or :data:`_ANY`; or "form",
hash of the punctuation allowed there, and the last character before it."""

_LINE = ord("\n")
_BLANKS = b" \n\r\t"
_PUNCTUATION = string.punctuation.encode()


class Indent(NamedTuple):
    """A line break, by how many blanks more are behind it than behind the one before."""

    change: int


class TokenForms:
    """What the texts of a vocabulary's tokens say about the form of a text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """Take the texts of all token ids."""
        rests = [text.strip(_BLANKS) for text in texts]
        plain = [not rest.strip(_PUNCTUATION) for rest in rests]
        bits = [
            form and len(text) == len(rest) > 0
            for form, text, rest in zip(plain, texts, rests, strict=True)
        ]
        self.punctuation = np.packbits(np.array(bits, bool), bitorder="little")
        """Tokens of punctuation alone, 8 a byte, the lowest id in the lowest bit."""
        self._plain = plain
        self._ends = bytes(rest[-1] if rest else _LINE for rest in rests)
        self._indents = {
            token: len(text) - 1
            for token, text in enumerate(texts)
            if text.startswith(b"\n") and not text[1:].strip(b" ")
        }
        self._breaks = {indent: token for token, indent in self._indents.items()}

    def end(self, token: int) -> int:
        """Return a token's last character that is not white space; of white space a line break."""
        return 0 if token == _ANY else self._ends[token]

    def indent(self, token: int, before: int) -> int:
        """Return blanks behind the last line break after a token, if there were ``before`` ones."""
        return self._indents.get(token, before)

    def form(self, token: int, indent: int) -> int | Indent | None:
        """Return a token as a choice of form, in a line with an indentation; None: it has words."""
        if (blanks := self._indents.get(token)) is not None:
            return Indent(blanks - indent)
        return token if self._plain[token] else None

    def token(self, form: int | Indent, indent: int) -> int | None:
        """Return the token of a choice of form, in a line with an indentation; None: none."""
        return self._breaks.get(indent + form.change) if isinstance(form, Indent) else form


class Spot(NamedTuple):
    """Where a token is chosen."""

    allowed: bytes  # tokens that may come, 8 a byte, the lowest id in the lowest bit
    before: int  # the token before it
    indent: int  # blanks behind the last line break; -1: there was none

    def allows(self, token: int) -> bool:
        """Return whether a token may come."""
        return bool(self.allowed[token >> 3] >> (token & 7) & 1)

    def form(self, forms: TokenForms) -> Place:
        """Return the place as one of the same form."""
        mask = forms.punctuation
        kind = np.frombuffer(self.allowed, np.uint8, len(mask)) & mask
        return "form", hash(kind.tobytes()), forms.end(self.before)

    def places(self) -> tuple[Place, Place]:
        """Return the place behind the token before it, and behind any."""
        tokens = hash(self.allowed)
        return ("tokens", tokens, self.before), ("tokens", tokens, _ANY)


class Constraint(Protocol):
    """The state of a grammar after the tokens of a text."""

    @property
    def forms(self) -> TokenForms:
        """Of the vocabulary."""

    def allowed(self) -> NDArray[np.uint8] | None:
        """Return tokens that may come next, 8 a byte, the lowest id in the lowest bit; None: nobody
        waits for them, and nothing is guessed."""

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next, one after the other."""

    def push(self, token: int) -> None:
        """Append a token that may come next."""

    def pop(self, tokens: int) -> None:
        """Remove the newest tokens."""


class Choice(NamedTuple):
    """What is known of a place."""

    token: int | Indent  # the token chosen last, or a choice of form
    again: Ratio  # how often the one chosen before was chosen again


class GrammarPlaces:
    """What the texts of an owner chose at each place."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[Place, Choice] = OrderedDict()

    def note(self, spot: Spot, token: int, forms: TokenForms) -> None:
        """A token was chosen."""
        self._observe(spot.form(forms), forms.form(token, spot.indent))
        for place in spot.places():
            self._observe(place, token)
        while len(self._chosen) > _PLACES:
            self._chosen.popitem(last=False)

    def find(self, spot: Spot, forms: TokenForms) -> tuple[int, float] | None:
        """Return the token that was chosen before at such a place, and how often it was again;
        None: nothing is known that may come."""
        known = self._chosen.get(spot.form(forms))
        if known is not None:
            token = forms.token(known.token, spot.indent)
            if token is not None and spot.allows(token):
                return token, known.again.value()
        behind, anywhere = spot.places()
        known = self._chosen.get(behind) or self._chosen.get(anywhere)
        if known is None or isinstance(known.token, Indent):
            return None
        return known.token, known.again.value()

    def _observe(self, place: Place, chosen: int | Indent | None) -> None:
        """What was chosen at a place; None: something that is not remembered there."""
        known = self._chosen.pop(place) if place in self._chosen else None
        last, again = known or Choice(_ANY, Ratio(1.0, 2.0))
        if chosen is None and last == _ANY:
            return
        again.observe(right=last in (chosen, _ANY), memory=_MEMORY)
        self._chosen[place] = Choice(last if chosen is None else chosen, again)


class GrammarSource:
    """The guesses for one text."""

    def __init__(
        self,
        constraint: Constraint,
        stop_ids: Collection[int] = (),
        places: GrammarPlaces | None = None,
    ) -> None:
        """Begin at the anchor; no path goes on behind ``stop_ids``. ``places`` belong to the
        text's owner; None if nothing is known, and nothing is kept."""
        self._constraint = constraint
        self._stop_ids = stop_ids
        self._places = GrammarPlaces() if places is None else places
        self._forms = constraint.forms
        self._last = _ANY
        self._indent = -1
        self._probes: tuple[int, ...] = ()

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens of a step, which the constraint has taken."""
        self._constraint.pop(len(tokens))
        for token in tokens:
            allowed, count = self._few()
            if count > 1:
                spot = Spot(allowed, self._last, self._indent)
                self._places.note(spot, token, self._forms)
            self._constraint.push(token)
            self.skip(token)

    def skip(self, token: int) -> None:
        """Go on behind a token of the text without learning from it."""
        self._last, self._indent = token, self._forms.indent(token, self._indent)

    def propose(self, depth: int) -> TokenTree:
        """Return a chain of at most so many tokens; empty where the grammar is open."""
        tokens: list[int] = []
        confidences: list[float] = []
        survival, last, indent = 1.0, self._last, self._indent
        try:
            while len(tokens) < depth and (choice := self._next(last, indent)) is not None:
                last, confidence = choice
                survival *= confidence
                if survival < _MIN_SURVIVAL or last in self._stop_ids:
                    break
                self._constraint.push(last)
                indent = self._forms.indent(last, indent)
                tokens.append(last)
                confidences.append(confidence)
        finally:
            self._constraint.pop(len(tokens))
        return TokenTree.chain(tokens, confidences, source="grammar")

    def _next(self, before: int, indent: int) -> tuple[int, float] | None:
        """Return the likeliest token behind another one at the present place, in a line with an
        indentation, and its confidence; None if nothing is known."""
        allowed, count = self._few()
        if count == 1:
            bits = int.from_bytes(allowed, "little")
            return bits.bit_length() - 1, _SURE
        known = self._places.find(Spot(allowed, before, indent), self._forms) if count else None
        return None if known is None else (known[0], min(_SURE, known[1]))

    def _few(self) -> tuple[bytes, int]:
        """Return tokens allowed at the present place, and how many they are; none: it is free text,
        or nobody knows."""
        accepts = self._constraint.accepts
        if self._probes and sum([accepts((probe,)) for probe in self._probes]) >= _PROBES - 1:
            return b"", 0
        allowed = self._constraint.allowed()
        if allowed is None:
            return b"", 0
        used = np.count_nonzero(allowed)  # of bytes, in a tenth of the time of all bits
        if used <= _MAX_CHOICES:
            bits = allowed.tobytes()
            count = int.from_bytes(bits, "little").bit_count()
            if count <= _MAX_CHOICES:
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
    """Return the highest bit of a byte that is set."""
    return int(bits).bit_length() - 1
