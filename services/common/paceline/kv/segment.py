"""Memory of caches that verifier and drafters share: the seals and the header page.

A segment is a memfd: memory without a name, which the kernel frees with the last process that has
it open or mapped. The verifier maps it, seals it against everybody else's writes, and passes its
descriptor to drafters on the same host. Does not import torch.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from google.protobuf.message import DecodeError

from paceline.v1 import kv_pb2

NAME = "paceline-kv"  # name of segments in /proc/PID/fd
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE (Linux 5.1), which Python does not name
_SEALS = _FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HEADER_BYTES = 4096  # size of the header page; the KV planes follow it, in bytes
TAP_MARGIN = 512
"""Hidden states kept beyond a drafter's window, so that it has time to read the window. Unit:
tokens."""

TAP_AHEAD = 256
"""Maximum number of rows of hidden states that are written before they are committed, once there
is a reader. Unit: tokens."""

_MAGIC = int.from_bytes(b"PACEKV\0\3", "big")
_MAGIC_WORD, _EPOCH_WORD, _COMMITTED_WORD, _LAYOUT_WORD = 0, 1, 2, 3
_WORDS = 4
_LAYOUT_BYTES = HEADER_BYTES - 8 * _WORDS


def new_segment(byte_size: int) -> tuple[int, mmap.mmap]:
    """Make a segment that only its returned mapping can write, and return it with a descriptor,
    which the caller closes.

    It has memory for its header only; the owner gives it more with ``posix_fallocate``. Raises
    ``OSError``: it cannot be made or mapped, or the kernel is older than Linux 5.1; ``ValueError``:
    it is too large to be mapped.
    """
    file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, byte_size)
        os.posix_fallocate(file, 0, HEADER_BYTES)
        mapping = mmap.mmap(file, byte_size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(file)
        raise
    return file, mapping


def map_segment(file: int) -> mmap.mmap:
    """Map the segment of a descriptor, read-only. Raises ``OSError``: the descriptor is no memfd,
    or cannot be mapped; ``ValueError``: it is not sealed, so that its owner could take memory away
    from the mapping, or it has no header."""
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("it is not sealed")
    size = os.fstat(file).st_size
    if size < HEADER_BYTES:
        raise ValueError(f"it has {size} bytes, expected at least {HEADER_BYTES}")
    return mmap.mmap(file, 0, prot=mmap.PROT_READ)


class SegmentHeader:
    """Four 64-bit words in the machine's byte order, and the layout, at the start of a segment.

    ====  =============================================================================
    word  meaning
    ====  =============================================================================
    0     magic: this layout
    1     the epoch of the cache, at least 1; 0 before the cache is opened and once it is closed
    2     committed length. Unit: tokens
    3     bytes of the ``SegmentLayout`` (kv.proto) that follows the words
    ====  =============================================================================

    Safety contract:

    - Only the owner writes: the layout once in :meth:`describe`, words 0 and 1 once in
      :meth:`open`, word 2 from then on by the thread that writes the KV, after the KV it covers;
      word 1 a last time in :meth:`close`.
    - While word 1 stays the same, word 2 only grows, and positions below it never change. Both are
      single aligned words: a reader sees the old value or the new one.
    - Memory below the committed length keeps its contents even after :meth:`close`: the memory
      is written no more, and a mapping keeps its pages. So a reader never reads KV of
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
    def layout(self) -> kv_pb2.SegmentLayout:
        """What lies where in the segment. Raises ``ValueError``: there is no valid layout."""
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

    def open(self, epoch: int) -> None:
        """Make the segment readable. The epoch of the cache is at least 1."""
        assert epoch > 0
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
