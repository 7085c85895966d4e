"""Chunks of texts, by which a client finds the verifier, and a verifier the KV, of a prefix."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

# Texts are compared in chunks of this many tokens. A shorter common prefix is computed again.
CHUNK_TOKENS = 64


def chunk_keys(tokens: Sequence[int], owner: str = "") -> list[bytes]:
    """Return the key of each whole chunk: a digest of the owner and of the text up to its end."""
    state = blake2b(owner.encode(), digest_size=16)
    state.update(b"\0")
    keys = []
    text = memoryview(array("I", tokens))
    for start in range(0, len(text) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        state.update(text[start : start + CHUNK_TOKENS])
        keys.append(state.copy().digest())
    return keys
