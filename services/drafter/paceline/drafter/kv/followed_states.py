"""Hidden states of one cache, sent by its verifier."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.drafter.kv.errors import KvGone
from paceline.drafter.kv.updates import Update, UpdateStream
from paceline.drafter.kv.wanted import MOST_POSITIONS
from paceline.kvwire import decode_rows
from paceline.v1 import kv_pb2


class FollowedStates(UpdateStream):
    """Outputs of chosen layers at the newest positions: copies, kept in step.

    What a round has read may be forgotten, and with a window all but the newest is: so what is held
    is bounded by what is still to be read. The event loop takes updates in as they come; one
    other thread at a time reads.

    Attributes:
        committed: Positions below this may be read, as far as they are held. Unit: tokens.
    """

    transport: ClassVar[str] = "follow"
    byte_size: ClassVar[int] = 0
    """Of the verifier's memory that is mapped: nothing."""

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        """See :meth:`open`."""
        super().__init__(connect, subscribe)
        self.committed = 0
        self._layers = tuple(subscribe.hidden_state_layers)
        self._most = subscribe.hidden_state_window or MOST_POSITIONS
        self._lock = threading.Lock()
        self._start = 0
        self._rows: Tensor | None = None
        self._more = asyncio.Event()
        self._patient = True

    async def caught_up(self, committed: int, seconds: float) -> None:
        """Wait until positions below ``committed`` are there, or the time is over. Event loop.

        Who waited in vain does not wait again before something has come: a lost link costs once.
        """
        if not self._patient:
            return
        try:
            async with asyncio.timeout(seconds):
                while self.committed < committed and self._gone is None:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            self._patient = False

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """See :meth:`paceline.drafter.methods.base.TargetStates.read`.

        Positions below ``begin`` are forgotten.
        """
        with self._lock:
            if self._rows is None:
                return end, torch.empty(0, 0)
            first = min(end, max(begin, self._start))
            found = self._rows[first - self._start : end - self._start].clone()
            if begin > self._start:
                # A copy, or the rows before it would stay in memory.
                self._rows = self._rows[begin - self._start :].clone()
                self._start = begin
            return first, found

    def close(self) -> None:
        """End the stream and let go of what is held. Closing twice is safe, on any thread."""
        with self._lock:
            self._rows = None
        super().close()

    def _begin(self) -> None:
        self._subscribe.hidden_state_start = self.committed

    def _room(self) -> int:
        return self._most * len(self._layers)

    def _positions(self, message: kv_pb2.FollowCacheResponse) -> int:
        return sum(rows.count for rows in message.hidden_states)

    async def _arrived(self, update: Update) -> None:
        for message in update.messages:
            if message.hidden_states:
                self._append(message, update.shape)
        if update.committed < self.committed:
            raise KvGone(
                f"the verifier committed {self.committed} positions, and now {update.committed}"
            )
        self.committed = update.committed
        self._acknowledge(update.stream, update.number)
        self._patient = True
        self._more.set()

    def _append(self, message: kv_pb2.FollowCacheResponse, shape: kv_pb2.KvShape) -> None:
        parts = {rows.layer: rows for rows in message.hidden_states}
        start, count = message.hidden_states[0].start, message.hidden_states[0].count
        if (
            len(parts) != len(message.hidden_states)
            or set(parts) != set(self._layers)
            or any((rows.start, rows.count) != (start, count) for rows in parts.values())
            or start + count > message.committed_length
        ):
            raise KvGone("the verifier sent hidden states that do not fit together")
        try:
            rows = torch.cat(
                [
                    decode_rows(parts[layer].data, count, shape.hidden_size, shape.dtype)
                    for layer in self._layers
                ],
                dim=1,
            )
        except ValueError as error:
            raise KvGone(f"the verifier sent hidden states that are none: {error}") from error
        with self._lock:
            self._take_in(start, rows)

    def _take_in(self, start: int, rows: Tensor) -> None:
        held = self._rows
        if held is None or start != self._start + len(held):
            held, self._start = rows, start  # the first, or what came between was left out
        else:
            held = torch.cat([held, rows])
        extra = max(0, len(held) - self._most)
        self._rows, self._start = held[extra:].clone() if extra else held, self._start + extra
