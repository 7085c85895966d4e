"""A model that is a hash of the text, with a byte tokenizer."""

from __future__ import annotations

import hashlib
import zlib
from array import array

from paceline.client import MockTransport

END = MockTransport.END
TOKENIZER = MockTransport("")._json
DIGEST = hashlib.sha256(TOKENIZER).hexdigest()
LETTERS = b"abcdefgh "


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake target: one letter, a function of all tokens before it."""
    return LETTERS[zlib.crc32(array("I", tokens).tobytes(), seed % 2**32) % len(LETTERS)]


def continuation(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    """What every generation must emit."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]
