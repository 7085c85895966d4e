"""KV of ended texts, kept for prompts that begin in the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Items
from hashlib import blake2b

import numpy as np

from paceline.verifier.engine.sequence import Sequence

CHUNK_TOKENS = 64
"""Texts are compared in chunks of this many tokens. A shorter common prefix is computed again."""

Key = bytes
"""Digest of an owner and the chunks of a text up to one of them."""


class PrefixCache:
    """Finds a sequence of the same owner with the longest common prefix, in whole chunks.

    Sequences that run are found once they are prefilled. Those that have ended are kept until
    their memory is needed; the least recently used one goes first. Only the engine thread uses it.

    Attributes:
        hits: Prompts that found a prefix.
        reused_tokens: Tokens of these prefixes.
    """

    def __init__(self, max_kept: int) -> None:
        """Make an empty cache that keeps at most ``max_kept`` ended sequences."""
        self._max_kept = max_kept
        self._kept: OrderedDict[Sequence, None] = OrderedDict()
        self._found: dict[Key, dict[Sequence, None]] = {}
        self._keys: dict[Sequence, list[Key]] = {}

    def __len__(self) -> int:
        """Number of ended sequences that are kept."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Sequence]:
        """Ended sequences, the least recently used one first. Any thread may iterate."""
        return iter(list(self._kept))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence be found by its committed text. A second call adds what is new."""
        keys = self._keys.setdefault(sequence, [])
        new = _keys(sequence.owner, sequence.tokens[: sequence.committed])[len(keys) :]
        for key in new:
            self._found.setdefault(key, {})[sequence] = None
        keys += new

    def keep(self, sequence: Sequence) -> None:
        """Keep a sequence that has ended, instead of those whose text it continues.

        A text of less than a chunk is closed instead.
        """
        self.add(sequence)
        keys = self._keys[sequence]
        if not keys:
            self.close(sequence)
            return
        for key in keys:
            for other in list(self._found[key]):
                if other is not sequence and other in self._kept and self._keys[other][-1] == key:
                    self.close(other)
        self._kept[sequence] = None
        while len(self._kept) > self._max_kept:
            self.evict()

    def find(self, sequence: Sequence) -> Sequence | None:
        """A sequence that begins like the prompt of a new one; None: there is none."""
        best: Sequence | None = None
        for key in _keys(sequence.owner, sequence.tokens[:-1]):
            found = self._found.get(key)
            if not found:
                break
            best = next(reversed(found))
        if best is not None and best in self._kept:
            self._kept.move_to_end(best)
        return best

    def evict(self) -> bool:
        """Free the memory of the least recently used sequence; returns whether there was one."""
        if not self._kept:
            return False
        self.close(next(iter(self._kept)))
        return True

    def close(self, sequence: Sequence) -> None:
        """Free the memory of a sequence, which is not found any more."""
        for key in self._keys.pop(sequence, ()):
            found = self._found[key]
            del found[sequence]
            if not found:
                del self._found[key]
        self._kept.pop(sequence, None)
        sequence.segment.close()

    def clear(self) -> None:
        """Free the memory of all ended sequences."""
        while self.evict():
            pass


def _keys(owner: str, tokens: Items[int]) -> list[Key]:
    """The key of each whole chunk: a digest of the owner and of the text up to its end."""
    state = blake2b(owner.encode(), digest_size=16)
    state.update(b"\0")
    keys = []
    chunks = np.asarray(tokens, dtype=np.uint32)
    for start in range(0, len(chunks) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        state.update(chunks[start : start + CHUNK_TOKENS].tobytes())
        keys.append(state.copy().digest())
    return keys
