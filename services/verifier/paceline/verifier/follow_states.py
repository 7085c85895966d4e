"""Hidden states for a follower: rows of what was committed since it was last told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.kvwire import encode_rows
from paceline.shm import TAP_AHEAD
from paceline.v1 import verifier_pb2
from paceline.verifier.cache import Cache


class StateFeed:
    """What one follower of hidden states has been sent. Belongs to the event loop.

    It copies rows of committed positions while the engine may write those of newer ones into the
    same ring. As any reader it looks afterwards how far the engine has come (see
    :class:`paceline.shm.SegmentHeader`), and leaves out what may have been overwritten.
    """

    def __init__(self, cache: Cache, layers: Sequence[int], window: int, start: int) -> None:
        """Begin with a follower that holds what lies below ``start``.

        Args:
            cache: What is followed; it keeps the states of these layers.
            layers: Layers sent, 0 for the first.
            window: Only so many positions before the committed length; 0: all. Unit: tokens.
            start: First position wanted.
        """
        self._sequence = cache.sequence
        self._layers = layers
        self._window = window
        self._next = start
        assert cache.sequence.segment.taps is not None, "checked when it was subscribed"
        layout = cache.sequence.segment.taps.layout
        self.hidden = layout.hidden
        self.row_bytes = len(layers) * layout.row_bytes

    def pieces(
        self, committed: int, message_bytes: int
    ) -> Iterator[list[verifier_pb2.HiddenStates]]:
        """Rows up to a committed length, in pieces of at most so many bytes or one position.

        Args:
            committed: As it is now. Unit: tokens.
            message_bytes: Bytes of a piece; time may pass between two, but the cache must not go.
        """
        rows = max(1, message_bytes // self.row_bytes)
        kept = max(0, committed - self._window) if self._window else 0
        begin = max(self._next, kept)
        while begin < committed:
            end = min(committed, begin + rows)
            piece = self._copy(begin, end)
            if piece:
                yield piece
            begin = end
        self._next = max(self._next, committed)

    def _copy(self, begin: int, end: int) -> list[verifier_pb2.HiddenStates]:
        planes = self._sequence.segment.taps
        if planes is None:
            return []
        begin = max(begin, planes.first_kept(self._sequence.committed))
        copies = planes.copy(self._layers, begin, end)
        overwritten = self._sequence.committed + TAP_AHEAD - planes.layout.slots
        first = max(begin, overwritten)
        return [
            verifier_pb2.HiddenStates(
                layer=layer,
                start=first,
                count=end - first,
                data=encode_rows(rows[first - begin :]),
            )
            for layer, rows in zip(self._layers, copies, strict=True)
            if first < end
        ]
