"""Which verifier has the KV of which texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ._members import Verifier

CHUNK = 64
"""Texts are compared in chunks of so many tokens."""
_MOST_CHUNKS = 1 << 16


class PrefixTable:
    """Finds the verifier that served the longest prefix of a text.

    It keeps a hash for each chunk of a text and all before it, of the newest texts. Equal hashes
    of different texts would lead to a verifier without the prefix, which changes no token.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[Verifier, str]] = OrderedDict()

    def add(self, tokens: Sequence[int], verifier: Verifier) -> None:
        """Records that a verifier has the KV of a text."""
        for key in _keys(tokens):
            self._holders[key] = verifier, _instance(verifier)
            self._holders.move_to_end(key)
        while len(self._holders) > _MOST_CHUNKS:
            self._holders.popitem(last=False)

    def find(self, tokens: Sequence[int], verifiers: Sequence[Verifier]) -> Verifier | None:
        """The one of these verifiers with the longest prefix; None if none has a chunk of it."""
        found = None
        for key in _keys(tokens):
            verifier, instance = self._holders.get(key, (None, ""))
            if verifier is not None and instance == _instance(verifier) and verifier in verifiers:
                found = verifier
        return found


def _instance(verifier: Verifier) -> str:
    """Identifies the process, whose end frees all KV."""
    return verifier.facts.instance_id if verifier.facts is not None else ""


def _keys(tokens: Sequence[int]) -> Iterator[int]:
    """A hash for each whole chunk, of this chunk and all before it."""
    key = 0
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        key = hash((key, *tokens[end - CHUNK : end]))
        yield key
