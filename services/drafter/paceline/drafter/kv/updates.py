"""A FollowCache stream read to its end, through losses of the link."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import grpc

from paceline.drafter.kv.errors import KvGone, KvNotShared
from paceline.v1 import kv_pb2

logger = logging.getLogger("paceline.drafter")

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Waits before a lost stream is opened again. Unit: seconds."""

_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
"""After these a stream may be opened again; any other is the verifier's last word."""


@dataclass(frozen=True)
class Update:
    """One whole update.

    Attributes:
        stream: Which of the streams it came by.
        shape: As that stream began.
        messages: All of it.
    """

    stream: int
    shape: kv_pb2.KvShape
    messages: list[kv_pb2.FollowCacheResponse]

    @property
    def number(self) -> int:
        """Its number in the stream."""
        return self.messages[-1].update_id

    @property
    def committed(self) -> int:
        """Committed length that it speaks of. Unit: tokens."""
        return self.messages[-1].committed_length


class UpdateStream(ABC):
    """Reads updates of one cache on the event loop; what becomes of them is a subclass's.

    A slow or lost link costs speed alone: what was sent stays right, since committed positions
    never change; it only gets old. A lost stream is opened again in the background.

    Whoever opened it closes it, once, after its last use.

    Attributes:
        received: All that came over the wire so far. Unit: bytes.
    """

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        """See :meth:`open`."""
        self.received = 0
        self._connect = connect
        self._subscribe = subscribe
        self._gone: KvGone | None = None
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._stream = 0
        self._taken: tuple[int, int] = (0, 0)
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @classmethod
    async def open(
        cls,
        connect: Callable[[], Any],
        subscribe: kv_pb2.FollowSubscribe,
        timeout: float,
    ) -> Self:
        """Subscribe, and wait for the verifier's word that it will send.

        Args:
            connect: Opens a FollowCache call; raises KvGone where none is to be opened any more.
            subscribe: What to ask for.
            timeout: How long to wait. Unit: seconds.

        Raises:
            KvNotShared: It refuses, or does not answer in time.
        """
        followed = cls(connect, subscribe)
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

    def check(self) -> None:
        """Make sure that the verifier has not said that the cache is gone.

        Raises:
            KvGone: It has, or what it sent makes no sense.
        """
        if self._gone is not None:
            raise self._gone

    def close(self) -> None:
        """End the stream. Closing twice is safe, on any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the stream with it
            self._loop.call_soon_threadsafe(self._task.cancel)

    @abstractmethod
    def _begin(self) -> None:
        """A stream is about to be opened: the subscription may be changed."""

    @abstractmethod
    def _room(self) -> int:
        """Most positions that an update may bring, over all layers."""

    @abstractmethod
    def _positions(self, message: kv_pb2.FollowCacheResponse) -> int:
        """Positions that a message brings, over all layers."""

    @abstractmethod
    async def _arrived(self, update: Update) -> None:
        """An update is there. Nothing more is read before this returns."""

    def _acknowledge(self, stream: int, number: int) -> None:
        """An update was taken in. Event loop."""
        self._taken = (stream, number)
        self._news.set()

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
                self._first.set_exception(KvNotShared(f"the verifier sends nothing: {lost}"))
                return
            delay = FIRST_DELAY if self.received > received else min(2 * delay, LONGEST_DELAY)
            logger.debug("lost the KV stream, again in %.1f s: %s", delay, lost)
            await asyncio.sleep(delay)

    async def _read_stream(self) -> None:
        self._stream += 1
        self._begin()
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
                    room = self._room()
                messages.append(message)
                room -= self._positions(message)
                if room < 0:
                    raise KvGone("the verifier sends more positions than the budget allows")
                if message.last:
                    update, messages = Update(self._stream, shape, messages), []
                    await self._arrived(update)
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
                    ack = kv_pb2.FollowAck(update_id=number, budget=self._subscribe.budget)
                    await call.write(kv_pb2.FollowCacheRequest(ack=ack))
