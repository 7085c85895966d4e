"""Updates of a FollowCache stream, through losses of the link."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import grpc

from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.drafter.kv.held import HeldPositions
from paceline.drafter.kv.wanted import MOST_POSITIONS
from paceline.v1 import kv_pb2

logger = logging.getLogger("paceline.drafter")

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Waits before a lost stream is opened again. Unit: seconds."""

UPDATES_AHEAD = 3
"""Updates kept that no round has taken in yet, one more than the verifier may send; further ones
are not read from the wire."""

_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
"""After these a stream may be opened again; any other is the verifier's last word."""


Held = TypeVar("Held", bound=HeldPositions)


@dataclass(frozen=True)
class _Update:
    stream: int
    shape: kv_pb2.KvShape
    messages: list[kv_pb2.FollowCacheResponse]

    @property
    def number(self) -> int:
        return self.messages[-1].update_id

    @property
    def committed(self) -> int:
        return self.messages[-1].committed_length


class Following(Generic[Held]):
    """What the verifier chose of a cache, for chosen layers, kept in step by it.

    A slow or lost link costs speed alone: what is held stays right, since committed positions never
    change; it only gets old. A lost stream is opened again in the background, and replaces what is
    held once its first update is there.

    The event loop reads the stream. :meth:`take_in`, :meth:`check` and :meth:`close` are for one
    thread at a time. Only what was taken in is acknowledged, so that the verifier sends no faster
    than rounds go. Whoever opened it closes it, once, after its last use.

    Attributes:
        layers: The followed layers as they were asked for, negative ones included.
        received: All that came over the wire so far. Unit: bytes.
        updates: Updates taken in so far.
        committed: Committed length that the newest update taken in speaks of. Unit: tokens.
    """

    _kind: type[Held]
    """What updates add up to."""

    def __init__(
        self,
        connect: Callable[[], Any],
        subscribe: kv_pb2.FollowSubscribe,
        layers: Sequence[int],
    ) -> None:
        """See :meth:`open`."""
        self.layers = tuple(layers)
        self.received = self.updates = self.committed = 0
        self._connect = connect
        self._subscribe = subscribe
        self._budget = self._largest_budget = subscribe.budget
        self._gone: KvGone | None = None
        self._pending: deque[_Update] = deque()
        # Of the thread that reads KV:
        self._held: Held | None = None
        self._held_stream = 0
        # Of the event loop:
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._stream = 0
        self._taken: tuple[int, int] = (0, 0)
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @classmethod
    async def open(
        cls,
        connect: Callable[[], Any],
        subscribe: kv_pb2.FollowSubscribe,
        layers: Sequence[int],
        timeout: float,
    ) -> Self:
        """Subscribe, and wait for the verifier's word that it will send.

        Args:
            connect: Opens a FollowCache call; raises KvGone where none is to be opened any more.
            subscribe: What to ask for; its layers are ``layers``.
            layers: At least one.
            timeout: How long to wait. Unit: seconds.

        Raises:
            KvNotShared: It refuses, or does not answer in time.
        """
        followed = cls(connect, subscribe, layers)
        try:
            async with asyncio.timeout(timeout):
                await followed._first
        except TimeoutError:
            followed.close()
            raise KvNotShared(f"the verifier did not answer within {timeout:g} s") from None
        except BaseException:
            followed.close()
            raise
        return followed

    @property
    def positions(self) -> int:
        """Positions held of each layer."""
        held = self._held
        return 0 if held is None else len(held)

    def take_in(self, below: int, budget: int) -> None:
        """Take in what came meanwhile, unless it speaks of positions at or above ``below``.

        Another budget than before goes to the verifier with the next acknowledgement.

        Raises:
            KvGone: What came makes no sense.
        """
        self._budget = budget or MOST_POSITIONS
        self._largest_budget = max(self._budget, self._largest_budget)
        while self._pending and self._pending[0].committed <= below:
            self._apply(self._pending.popleft())

    def check(self) -> None:
        """Make sure that the verifier has not said that the cache is gone.

        Raises:
            KvGone: It has, or what it sent makes no sense.
        """
        if self._gone is not None:
            raise self._gone

    def close(self) -> None:
        """End the stream and let go of the copies. Closing twice is safe, on any thread."""
        self._held = None
        with suppress(RuntimeError):  # the loop is closed, and the stream with it
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _apply(self, update: _Update) -> None:
        try:
            if self._held is None or update.stream != self._held_stream:
                self._held, self._held_stream = self._kind(update.shape), update.stream
            self._held.apply(update.messages, self._largest_budget)
        except KvGone as error:
            self._gone = error
            raise
        self.committed = update.committed
        self.updates += 1
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._acknowledge, update.stream, update.number)

    def _acknowledge(self, stream: int, number: int) -> None:
        self._taken = (stream, number)
        self._news.set()
        self._room.set()

    async def _follow(self) -> None:
        """Read streams, one after the other, until the cache is gone."""
        delay = FIRST_DELAY
        while self._gone is None:
            received = self.received
            lost = "the verifier ended the stream"
            try:
                await self._read_stream()
            except grpc.aio.AioRpcError as error:
                lost = f"{error.code().name}: {error.details()}"
                if error.code() not in _LOST:
                    self._gone = KvGone(f"the verifier sends no more of the cache: {lost}")
            except KvGone as error:
                self._gone = error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                lost = "the connection was closed"  # which cancels the call, not this task
            if not self._first.done():
                self._first.set_exception(KvNotShared(f"the verifier sends no KV: {lost}"))
                return
            delay = FIRST_DELAY if self.received > received else min(2 * delay, LONGEST_DELAY)
            logger.debug("lost the KV stream, again in %.1f s: %s", delay, lost)
            await asyncio.sleep(delay)

    async def _read_stream(self) -> None:
        self._stream += 1
        self._subscribe.budget = self._budget
        call = self._connect()
        answering = asyncio.create_task(self._answer(call, self._stream))
        try:
            await call.write(kv_pb2.FollowCacheRequest(subscribe=self._subscribe))
            shape: kv_pb2.KvShape | None = None
            messages: list[kv_pb2.FollowCacheResponse] = []
            room = 0
            while (message := await call.read()) is not grpc.aio.EOF:
                self.received += message.ByteSize()
                if shape is None:
                    shape = message.shape
                    if not self._first.done():
                        self._first.set_result(None)
                    continue
                if not messages:
                    room = self._largest_budget * len(self.layers)
                messages.append(message)
                room -= sum(len(chunk.positions) for chunk in message.chunks)
                if room < 0:
                    raise KvGone("the verifier sends more positions than the budget allows")
                if message.last:
                    self._pending.append(_Update(self._stream, shape, messages))
                    messages = []
                    while len(self._pending) >= UPDATES_AHEAD:
                        self._room.clear()
                        await self._room.wait()
        finally:
            answering.cancel()
            call.cancel()

    async def _answer(self, call: Any, stream: int) -> None:
        """Acknowledge the newest update taken in, as often as there is one."""
        told = 0
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns of it
            while True:
                await self._news.wait()
                self._news.clear()
                of_stream, number = self._taken
                if of_stream == stream and number > told:
                    told = number
                    ack = kv_pb2.FollowAck(update_id=number, budget=self._budget)
                    await call.write(kv_pb2.FollowCacheRequest(ack=ack))
