"""Shared-memory segments: names, the header page, and whether the owner process is alive.

The verifier writes segments; drafters on the same host map them read-only. Does not import torch.
"""

from __future__ import annotations

import fcntl
import mmap
import re
from pathlib import Path

from google.protobuf.message import DecodeError

from paceline.v1 import kv_pb2

SHM = Path("/dev/shm")
PREFIX = "paceline-"

HEADER_BYTES = 4096
"""Size of the header page; the KV planes follow it. Unit: bytes."""

TAP_MARGIN = 512
"""Hidden states kept beyond a drafter's window, so that it has time to read the window. Unit:
tokens."""

TAP_AHEAD = 256
"""Most rows of hidden states that are written before they are committed, once there is a reader.
Unit: tokens."""

_NAME = re.compile(rf"{PREFIX}[0-9]{{1,20}}-[0-9]{{1,20}}-[0-9a-f]{{16}}")
_DIGEST_BYTES = 32
_MAGIC = int.from_bytes(b"PACEKV\0\2", "big")
_MAGIC_WORD, _EPOCH_WORD, _COMMITTED_WORD, _LAYOUT_WORD, _DIGEST_WORD = 0, 1, 2, 3, 4
_WORDS = 8
_LAYOUT_BYTES = HEADER_BYTES - 8 * _WORDS


def segment_path(name: str) -> Path:
    """Returns the file of a segment: ``paceline-<pid>-<process start in ticks>-<16 hex digits>``.

    Raises:
        ValueError: It is not the name of a segment. This keeps names received over the network from
            leading to other files.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of a KV segment")
    return SHM / name


def claim(file: int) -> None:
    """Own a new segment for as long as this file descriptor stays open.

    The owner holds a lock on the file, which the kernel drops however the process ends. Process ids
    would mean nothing between containers that share /dev/shm.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def is_orphan(file: int) -> bool:
    """Returns whether the owner of a segment has ended.

    Takes a shared lock and drops it at once, so that concurrent callers do not disturb each other.

    Args:
        file: The caller's own file descriptor of the segment, in any open mode.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


class SegmentHeader:
    """Eight 64-bit words in the machine's byte order, and the layout, at the start of a segment.

    ====  =============================================================================
    word  meaning
    ====  =============================================================================
    0     magic: this layout
    1     the epoch of the cache, at least 1; 0 before the cache is opened and once it is closed
    2     committed length. Unit: tokens
    3     bytes of the ``SegmentLayout`` (kv.proto) that follows the words
    4-7   SHA-256 of the cache's read grant, by which a reader checks that it has the right file
    ====  =============================================================================

    Safety contract:

    - Only the owner writes: the layout once in :meth:`describe`, words 0, 1 and 4-7 once in
      :meth:`open`, word 2 from then on by the thread that writes the KV, after the KV it covers;
      word 1 a last time in :meth:`close`.
    - While word 1 stays the same, word 2 only grows, and positions below it never change. Both are
      single aligned words: a reader sees the old value or the new one.
    - Memory below the committed length keeps its contents even after :meth:`close`: the file is
      unlinked and written no more, and a mapping keeps its pages. So a reader never reads KV of
      another cache. Word 1 shows that the cache was closed.
    - Hidden states, if any are kept, lie in rings: position p in slot p mod slots. Rows are
      written before the committed length that covers them, at most ``TAP_AHEAD`` at a time. A row
      of position p was read whole if the committed length c read afterwards satisfies c +
      ``TAP_AHEAD`` - p <= slots.
    - Stores reach other cores in order on x86. Elsewhere a reader may see word 2 before the KV it
      covers: its drafts get worse for a round, and no output changes.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        """View the header of a mapped segment of at least ``HEADER_BYTES``.

        Through a read-only mapping all writing raises TypeError.
        """
        page = memoryview(mapping)[:HEADER_BYTES]
        self._words = page[: _WORDS * 8].cast("Q")
        self._layout = page[_WORDS * 8 :]

    @property
    def valid(self) -> bool:
        """Whether the magic number is there."""
        return self._words[_MAGIC_WORD] == _MAGIC

    @property
    def epoch(self) -> int:
        """The epoch of the cache; 0: closed."""
        return self._words[_EPOCH_WORD]

    @property
    def committed(self) -> int:
        """Positions that may be read. Unit: tokens."""
        return self._words[_COMMITTED_WORD]

    @property
    def grant_digest(self) -> bytes:
        """SHA-256 of the read grant."""
        return self._words[_DIGEST_WORD:].tobytes()

    @property
    def layout(self) -> kv_pb2.SegmentLayout:
        """What lies where in the segment.

        Raises:
            ValueError: There is no valid layout.
        """
        size = self._words[_LAYOUT_WORD]
        if not 0 < size <= _LAYOUT_BYTES:
            raise ValueError(f"its layout has {size} bytes, expected 1 to {_LAYOUT_BYTES}")
        try:
            return kv_pb2.SegmentLayout.FromString(bytes(self._layout[:size]))
        except DecodeError as error:
            raise ValueError(f"its layout cannot be read: {error}") from error

    def describe(self, layout: kv_pb2.SegmentLayout) -> None:
        """Write the layout, before :meth:`open`."""
        data = layout.SerializeToString()
        self._layout[: len(data)] = data
        self._words[_LAYOUT_WORD] = len(data)

    def open(self, epoch: int, grant_digest: bytes) -> None:
        """Make the segment readable.

        Args:
            epoch: The epoch of the cache, at least 1.
            grant_digest: SHA-256 of the read grant, 32 bytes.
        """
        assert epoch > 0
        assert len(grant_digest) == _DIGEST_BYTES
        self._words[_DIGEST_WORD:] = memoryview(grant_digest).cast("Q")
        self._words[_MAGIC_WORD] = _MAGIC
        self._words[_EPOCH_WORD] = epoch

    def commit(self, tokens: int) -> None:
        """Publish that positions below ``tokens`` are final."""
        self._words[_COMMITTED_WORD] = tokens

    def close(self) -> None:
        """Publish that the cache is gone."""
        self._words[_EPOCH_WORD] = 0

    def release(self) -> None:
        """Drop the reference to the mapping; the header cannot be used afterwards."""
        self._words.release()
        self._layout.release()
