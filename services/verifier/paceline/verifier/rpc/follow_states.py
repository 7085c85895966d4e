"""Hidden states for a FollowCache stream: rows of positions committed since the last update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.kv.segment import TAP_AHEAD
from paceline.kv.wire import encode_rows
from paceline.v1 import verifier_pb2
from paceline.verifier.cache import Cache


class StateFeed:
    """The hidden states that one drafter is sent. Belongs to the event loop.

    It copies rows of committed positions while the engine may write rows of newer positions into
    the same ring. As every reader (see :class:`paceline.kv.segment.SegmentHeader`), it reads the
    committed length again after the copy and drops rows that may have been overwritten.
    """

    def __init__(self, cache: Cache, layers: Sequence[int], window: int, start: int) -> None:
        """Start from a drafter that has the rows below ``start``.

        Args:
            cache: The followed cache, which keeps the hidden states of these layers.
            layers: Layers sent, counted from 0.
            window: Only this many newest positions; 0: all. Unit: tokens.
            start: First position to send.
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
        """Yields the rows up to a committed length, in pieces of one message each.

        Args:
            committed: The committed length now. Unit: tokens.
            message_bytes: Most bytes of a piece, unless one position is larger. Between two pieces
                the caller may wait, but the cache must not be released.
        """
        rows = max(1, message_bytes // self.row_bytes)
        begin = max(self._next, committed - self._window if self._window else 0)
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
