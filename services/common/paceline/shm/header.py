"""The page at the start of a segment, by which readers know whether they may go on."""

from __future__ import annotations

import mmap

HEADER_BYTES = 4096
"""The KV planes begin here. Unit: bytes from the start of the file."""

DIGEST_BYTES = 32

TAP_MARGIN = 512
"""Hidden states that are kept beyond a window, so that a reader of the window has time. Unit:
tokens."""

TAP_AHEAD = 256
"""Most rows of hidden states that are written before they are committed, once there is a reader.
Unit: tokens."""

_MAGIC = int.from_bytes(b"PACEKV\0\1", "big")
_MAGIC_WORD, _GENERATION_WORD, _COMMITTED_WORD, _DIGEST_WORD = 0, 1, 2, 4
_WORDS = 8


class SegmentHeader:
    """Eight 64-bit words in the machine's byte order, seen through a mapping of the segment.

    ====  =============================================================================
    word  meaning
    ====  =============================================================================
    0     magic: this layout
    1     the cache's generation, at least 1; 0 before it is opened and once it is closed
    2     committed length. Unit: tokens
    3     not used
    4-7   SHA-256 of the cache's read grant: the file itself says who was to read it
    ====  =============================================================================

    Safety contract:

    - The owner alone writes: words 0, 1 and 4-7 once by :meth:`open`, word 2 from then on by the
      thread that writes the KV, after the KV it speaks of; word 1 a last time by :meth:`close`.
    - While word 1 stays, word 2 only grows, and positions below it never change. Both are single
      aligned words: a reader sees the old value or the new one.
    - Memory below the committed length is as the owner left it even after :meth:`close`: the file
      is unlinked and written no more, and a mapping keeps its pages. So a reader never reads what
      belongs to another cache; it can only be late, and word 1 tells.
    - Hidden states, where some are kept, lie in rings: position p in slot p mod slots. Rows are
      written before the committed length that covers them, at most ``TAP_AHEAD`` at a time. So a
      position p read when the committed length was c, and is c' afterwards, was read whole if c' +
      ``TAP_AHEAD`` - p is at most the number of slots.
    - Stores reach other cores in order on x86. Elsewhere a reader may see word 2 before the KV it
      speaks of: its guesses get worse for a round, no output changes.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        """Look at the header of a mapped segment, which must have at least ``HEADER_BYTES``.

        Through a read-only mapping all writing raises TypeError.
        """
        self._words = memoryview(mapping)[: _WORDS * 8].cast("Q")

    @property
    def valid(self) -> bool:
        """Whether it is a header at all."""
        return self._words[_MAGIC_WORD] == _MAGIC

    @property
    def generation(self) -> int:
        """The cache's generation; 0: closed."""
        return self._words[_GENERATION_WORD]

    @property
    def committed(self) -> int:
        """Positions that may be read. Unit: tokens."""
        return self._words[_COMMITTED_WORD]

    @property
    def grant_digest(self) -> bytes:
        """SHA-256 of the read grant."""
        return self._words[_DIGEST_WORD:].tobytes()

    def open(self, generation: int, grant_digest: bytes) -> None:
        """Let the readers in.

        Args:
            generation: Of the cache, at least 1.
            grant_digest: SHA-256 of its read grant, 32 bytes.
        """
        assert generation > 0
        assert len(grant_digest) == DIGEST_BYTES
        self._words[_DIGEST_WORD:] = memoryview(grant_digest).cast("Q")
        self._words[_MAGIC_WORD] = _MAGIC
        self._words[_GENERATION_WORD] = generation

    def commit(self, tokens: int) -> None:
        """Make positions below ``tokens`` known as final."""
        self._words[_COMMITTED_WORD] = tokens

    def close(self) -> None:
        """Tell readers that the cache is gone."""
        self._words[_GENERATION_WORD] = 0

    def release(self) -> None:
        """Let go of the mapping; nothing may be asked afterwards."""
        self._words.release()
