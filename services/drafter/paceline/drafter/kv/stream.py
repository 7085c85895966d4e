"""Reads the updates of a FollowCache call, and opens the call again when it is lost."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import grpc

from paceline.drafter.errors import KvGone, KvNotShared
from paceline.v1 import kv_pb2

logger = logging.getLogger("paceline.drafter")

FIRST_DELAY, MAX_DELAY = 0.1, 5.0
"""Delays before a lost stream is opened again, doubled after each attempt. Unit: seconds."""

_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
"""After these a stream is opened again; any other status is final."""


@dataclass(frozen=True)
class CacheUpdate:
    """One whole update.

    Attributes:
        stream: Number of the stream that it came by.
        shape: The stream's first message.
        messages: All messages of the update.
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
        """Committed length of the cache at this update. Unit: tokens."""
        return self.messages[-1].committed_length


class UpdateStream(ABC):
    """Receives the updates of one cache on the event loop; subclasses apply them.

    What was received before a loss of the link stays valid, since committed positions never change.
    A lost stream is opened again in the background.
    """

    received = 0

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        self._connect = connect
        self._subscribe = subscribe
        self._gone: KvGone | None = None
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._stream = 0
        self._applied = (0, 0)  # stream and number of the newest update applied
        self._ack_due = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    @classmethod
    async def open(
        cls,
        connect: Callable[[], Any],
        subscribe: kv_pb2.FollowSubscribe,
        timeout: float,
    ) -> Self:
        """Subscribe, and wait for the verifier's first message.

        Args:
            connect: Opens a FollowCache call; raises KvGone once no call may be opened.
            subscribe: The subscription.
            timeout: Longest wait. Unit: seconds.

        Raises:
            KvNotShared: The verifier refuses, or does not answer in time.
        """
        opened = cls(connect, subscribe)
        try:
            async with asyncio.timeout(timeout):
                await opened._first
        except TimeoutError:
            opened.close()
            raise KvNotShared(f"the verifier did not answer within {timeout:g} s") from None
        except BaseException:
            opened.close()
            raise
        return opened

    def check(self) -> None:
        if self._gone is not None:
            raise self._gone

    def close(self) -> None:
        """End the stream. Closing twice is safe, on any thread."""
        with suppress(RuntimeError):  # the loop is closed, and so is the stream
            self._loop.call_soon_threadsafe(self._task.cancel)

    @abstractmethod
    def _limit(self) -> int:
        """Returns the most positions that an update may bring, summed over layers."""

    @abstractmethod
    async def _receive(self, update: CacheUpdate) -> None:
        """Called with each update. The next message is read after it returns.

        Raises:
            KvGone: The update is invalid.
        """

    def _acknowledge(self, stream: int, number: int) -> None:
        """Acknowledge an update that was applied. Event loop."""
        self._applied = (stream, number)
        self._ack_due.set()

    async def _follow(self) -> None:
        """Read one stream after the other until the cache is gone."""
        delay = FIRST_DELAY
        while self._gone is None:
            received = self.received
            lost = "the verifier ended the stream"
            try:
                await self._read_stream()
            except grpc.aio.AioRpcError as error:
                lost = f"{error.code().name}: {error.details()}"
                if error.code() not in _LOST:
                    self._gone = KvGone(f"the verifier ended the updates of the cache: {lost}")
            except KvGone as error:
                self._gone = error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                lost = "the connection was closed"  # which cancels the call, not this task
            if not self._first.done():
                self._first.set_exception(KvNotShared(f"the verifier sends no updates: {lost}"))
                return
            delay = FIRST_DELAY if self.received > received else min(2 * delay, MAX_DELAY)
            logger.debug("lost the KV stream, again in %.1f s: %s", delay, lost)
            await asyncio.sleep(delay)

    async def _read_stream(self) -> None:
        self._stream += 1
        call = self._connect()
        acks = asyncio.create_task(self._send_acks(call, self._stream))
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
                    room = self._limit()
                messages.append(message)
                room -= sum(len(chunk.positions) for chunk in message.chunks)
                room -= sum(rows.count for rows in message.hidden_states)
                if room < 0:
                    raise KvGone("the verifier sent more positions than the budget allows")
                if message.last:
                    update, messages = CacheUpdate(self._stream, shape, messages), []
                    await self._receive(update)
        finally:
            acks.cancel()
            call.cancel()

    async def _send_acks(self, call: Any, stream: int) -> None:
        """Acknowledge the newest applied update, as often as it changes."""
        sent = 0
        # An error of the call is reported by the task that reads it.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._ack_due.wait()
                self._ack_due.clear()
                of_stream, number = self._applied
                if of_stream == stream and number > sent:
                    sent = number
                    ack = kv_pb2.FollowAck(update_id=number, budget=self._subscribe.budget)
                    await call.write(kv_pb2.FollowCacheRequest(ack=ack))
