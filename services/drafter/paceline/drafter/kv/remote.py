"""KV and hidden states received over gRPC, and the sparse view of a mapped cache."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc
import torch
from torch import Tensor

from paceline.drafter.kv import KvGone, KvNotShared
from paceline.drafter.kv.cuda import CudaKv
from paceline.drafter.kv.mapped import SharedKv
from paceline.drafter.kv.reader import KvReader, StateReader
from paceline.kv.wire import KV_TYPES, STATE_TYPES, decode, decode_rows
from paceline.v1 import kv_pb2

_GROWTH = 256


MAX_POSITIONS = 1 << 20  # the budget that is sent for a budget of 0, all positions
# Maximum number of positions newer than the verifier's selection that a sparse view reads in
# addition. With more of them the selection is too old to be used. Unit: tokens.
MAX_NEWER = 128

# Maximum number of updates received that no round has applied, one more than the verifier may send.
# Further ones are not read from the connection.
UPDATES_AHEAD = 3

# All messages of one update; the last one has its number and the committed length.
CacheUpdate = Sequence[kv_pb2.FollowCacheResponse]


class DeltaCache:
    """At most a budget of positions for each layer, with keys and values unless the wire has none.

    They fill the first slots of a table in no particular order: keys are rotated already, so that
    attention does not depend on the order. One thread at a time.
    """

    def __init__(self, shape: kv_pb2.KvShape) -> None:
        """Make an empty cache. Raises ``KvGone``: the shape is empty, or its types are unknown."""
        if not (shape.layers and shape.heads and shape.head_dim):
            raise KvGone(f"the verifier described KV of an empty shape: {shape}")
        if shape.dtype not in STATE_TYPES or shape.wire_dtype not in (0, *KV_TYPES):
            raise KvGone(f"the verifier sends KV of an unknown type: {shape}")
        self._shape = shape
        self._positions = [torch.empty(0, dtype=torch.int64) for _ in range(shape.layers)]
        # Of each layer, planes[kind, head, slot]: the KV of position positions[slot].
        self._planes = [self._new_planes(0) for _ in range(shape.layers)]

    def __len__(self) -> int:
        return len(self._positions[0])

    def positions(self, index: int) -> Tensor:
        """Return the positions of a layer, int64 ``[n]``, in the order of the table."""
        return self._positions[index]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each ``[Hkv, n, D]``; :meth:`apply` changes them."""
        keys, values = self._planes[index][:, :, : len(self._positions[index])]
        return keys, values

    def apply(self, update: CacheUpdate, budget: int) -> None:
        """Apply an update; ``budget`` is the maximum number of positions per layer after it. Raises
        ``KvGone`` if it contradicts itself or earlier updates. The cache must not be used then."""
        committed, count = update[-1].committed_length, len(self._positions)
        drops = [drop for message in update for drop in message.drops]
        chunks = [chunk for message in update for chunk in message.chunks]
        for layer in (*(drop.layer for drop in drops), *(chunk.layer for chunk in chunks)):
            if layer >= count:
                raise KvGone(f"the verifier sent layer {layer}, expected one below {count}")
        try:
            for index in range(count):
                self._change(
                    index,
                    [p for drop in drops if drop.layer == index for p in drop.positions],
                    [chunk for chunk in chunks if chunk.layer == index],
                    committed,
                )
        except (ValueError, IndexError) as error:
            raise KvGone(f"the verifier sent an update that does not fit: {error}") from error
        counts = {len(positions) for positions in self._positions}
        if len(counts) > 1 or max(counts) > budget:
            raise KvGone(
                f"the verifier's update leaves {sorted(counts)} positions in the layers, expected "
                f"the same number in each, at most {budget}"
            )

    def _change(
        self, index: int, drops: list[int], chunks: list[kv_pb2.KvChunk], committed: int
    ) -> None:
        """Drop positions of a layer, close the gaps, and append new ones. Raises ``ValueError``:
        the update does not fit."""
        before = self._positions[index]
        new = torch.tensor([p for chunk in chunks for p in chunk.positions], dtype=torch.int64)
        kept = ~torch.isin(before, torch.tensor(drops, dtype=torch.int64))
        end = len(before) - len(drops)
        if int(kept.sum()) != end:
            raise ValueError("it drops positions that are not in the cache")
        self._positions[index] = positions = torch.cat([before[kept], new])
        if len(positions.unique()) != len(positions):
            raise ValueError("a position comes twice")
        if len(new) and int(new.max()) >= committed:
            raise ValueError(f"position {int(new.max())} is not below {committed}")
        if not self._shape.wire_dtype:
            return
        planes = self._planes[index]
        if drops:
            planes[:, :, :end] = planes[:, :, : len(before)][:, :, kept]
        if len(positions) > planes.shape[2]:
            grown = self._new_planes(-(-len(positions) // _GROWTH) * _GROWTH)
            grown[:, :, :end] = planes[:, :, :end]
            self._planes[index] = planes = grown
        for chunk in chunks:
            begin, end = end, end + len(chunk.positions)
            size = (self._shape.heads, end - begin, self._shape.head_dim)
            both = ((chunk.keys, chunk.key_scales), (chunk.values, chunk.value_scales))
            for plane, (data, scales) in zip(planes, both, strict=True):
                decoded = decode(data, scales, size, self._shape.wire_dtype, plane.dtype)
                plane[:, begin:end] = decoded

    def _new_planes(self, slots: int) -> Tensor:
        shape = self._shape
        with torch.inference_mode(False):  # else they could be written in inference mode only
            return torch.zeros(
                (2, shape.heads, slots, shape.head_dim), dtype=STATE_TYPES[shape.dtype]
            )


class UpdateStream(ABC):
    """Receives the updates of one cache on the event loop; subclasses apply them.

    A stream that ends cannot be read any more: the verifier opens its sequence again.
    """

    received = 0

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        self._subscribe = subscribe
        self._gone: KvGone | None = None
        self._loop = asyncio.get_running_loop()
        self._shape: asyncio.Future[kv_pb2.KvShape] = self._loop.create_future()
        self._applied = 0  # number of the newest update applied
        self._ack_due = asyncio.Event()
        self._task = asyncio.create_task(self._follow(connect))

    @classmethod
    async def open(
        cls, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe, timeout: float
    ) -> Self:
        """Subscribe, and wait for the verifier's first message.

        ``connect`` opens a FollowCache call, and raises KvGone once no call may be opened;
        ``timeout`` is in seconds. Raises ``KvNotShared`` if the verifier refuses, or does not
        answer in time.
        """
        opened = cls(connect, subscribe)
        try:
            async with asyncio.timeout(timeout):
                await opened._shape
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
        """Return the most positions that an update may bring, summed over layers."""

    @abstractmethod
    async def _receive(self, update: CacheUpdate) -> None:
        """Called with each update. The next message is read after it returns. Raises ``KvGone``:
        the update is invalid."""

    def _acknowledge(self, number: int) -> None:
        """Acknowledge an update that was applied. Event loop."""
        self._applied = number
        self._ack_due.set()

    async def _follow(self, connect: Callable[[], Any]) -> None:
        """Read the stream until it ends."""
        why = "it ended the stream"
        try:
            await self._read_stream(connect())
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        except KvGone as error:
            why = str(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            why = "the connection was closed"  # which cancels the call, not this task
        self._gone = KvGone(f"the verifier sends no updates: {why}")
        if not self._shape.done():
            self._shape.set_exception(KvNotShared(str(self._gone)))

    async def _read_stream(self, call: Any) -> None:
        acks = asyncio.create_task(self._send_acks(call))
        try:
            await call.write(kv_pb2.FollowCacheRequest(subscribe=self._subscribe))
            messages: list[kv_pb2.FollowCacheResponse] = []
            room = 0
            while (message := await call.read()) is not grpc.aio.EOF:
                self.received += message.ByteSize()
                if not self._shape.done():
                    self._shape.set_result(message.shape)
                    continue
                if not messages:
                    room = self._limit()
                messages.append(message)
                room -= sum(len(chunk.positions) for chunk in message.chunks)
                room -= sum(rows.count for rows in message.hidden_states)
                if room < 0:
                    raise KvGone("more positions came than the budget allows")
                if message.last:
                    update, messages = messages, []
                    await self._receive(update)
        finally:
            acks.cancel()
            call.cancel()

    async def _send_acks(self, call: Any) -> None:
        """Acknowledge the newest applied update, as often as it changes."""
        # An error of the call is reported by the task that reads it.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._ack_due.wait()
                self._ack_due.clear()
                ack = kv_pb2.FollowAck(update_id=self._applied, budget=self._subscribe.budget)
                await call.write(kv_pb2.FollowCacheRequest(ack=ack))


class RemoteKv(UpdateStream, KvReader):
    """The verifier's selection of positions, copied into a delta cache.

    :meth:`refresh` applies updates, and only then acknowledges them, so that the verifier sends no
    faster than rounds apply them.
    """

    transport = "follow"
    committed = 0  # committed length at the newest update that was applied, in tokens

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        super().__init__(connect, subscribe)
        self.layers = tuple(subscribe.layers)
        # The delta cache; None before the first update is applied.
        self.cache: DeltaCache | None = None
        self._budget = self._largest_budget = subscribe.budget
        self._pending: deque[CacheUpdate] = deque()
        self._not_full = asyncio.Event()

    def refresh(self, below: int, budget: int) -> int:
        """See :class:`KvReader`. Updates beyond ``below`` wait.

        A changed budget is sent to the verifier with the next acknowledgement.
        """
        self._budget = budget or MAX_POSITIONS
        self._largest_budget = max(self._budget, self._largest_budget)
        while self._pending and self._pending[0][-1].committed_length <= below:
            self._apply(self._pending.popleft())
        return min(self.committed, below)

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """See :class:`KvReader`: one part at most."""
        if self.cache is None or not len(self.cache):
            return []
        return [self.cache.layer(self.layers.index(layer))]

    def order(self, layer: int) -> Tensor | None:
        cache = self.cache
        return None if cache is None else cache.positions(self.layers.index(layer)).argsort()

    def close(self) -> None:
        """End the stream and drop the delta cache. Closing twice is safe, on any thread."""
        self.cache = None
        super().close()

    def _apply(self, update: CacheUpdate) -> None:
        try:
            if self.cache is None:
                self.cache = DeltaCache(self._shape.result())
            self.cache.apply(update, self._largest_budget)
        except KvGone as error:
            self._gone = error
            raise
        self.committed = update[-1].committed_length
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._acknowledge, update[-1].update_id)

    def _acknowledge(self, number: int) -> None:
        self._subscribe.budget = self._budget
        super()._acknowledge(number)
        self._not_full.set()

    def _limit(self) -> int:
        return self._largest_budget * len(self.layers)

    async def _receive(self, update: CacheUpdate) -> None:
        self._pending.append(update)
        while len(self._pending) >= UPDATES_AHEAD:
            self._not_full.clear()
            await self._not_full.wait()


class SparseView(KvReader):
    """Positions of a mapped cache that the verifier's policy selects.

    The verifier sends positions only; keys and values are read from its memory. Positions newer
    than the selection are read too. Without a recent selection, the first and the newest positions
    are read.
    """

    def __init__(self, mapped: SharedKv | CudaKv, selection: RemoteKv) -> None:
        """Own a mapping and a subscription without keys and values; :meth:`close` closes both."""
        self.layers = mapped.layers
        self.selection = selection
        self._mapped = mapped
        # Positions read in addition; None: the selection is not used.
        self._newer: Tensor | None = None

    @property
    def received(self) -> int:
        """Bytes received over gRPC so far: positions."""
        return self.selection.received

    @property
    def committed(self) -> int:
        return self._mapped.committed

    def refresh(self, below: int, budget: int) -> int:
        length = min(self.committed, below)
        self.selection.refresh(length, budget)
        selected = self.selection.committed
        self._newer = None
        if (
            0 < budget < length
            and self.selection.cache
            and length - MAX_NEWER <= selected <= length
        ):
            self._newer = torch.arange(selected, length)
            return length
        return self._mapped.refresh(below, budget)

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """See :class:`KvReader`. Selected positions are copied."""
        cache = self.selection.cache
        if self._newer is None or cache is None:
            return self._mapped.parts(layer)
        positions = cache.positions(self.layers.index(layer))
        return [self._mapped.gather(layer, part) for part in (positions, self._newer) if len(part)]

    def order(self, layer: int) -> Tensor | None:
        cache = self.selection.cache
        if self._newer is None or cache is None:
            return None
        return torch.cat([cache.positions(self.layers.index(layer)), self._newer]).argsort()

    def check(self) -> None:
        self._mapped.check()
        self.selection.check()

    def close(self) -> None:
        """Close the mapping and the subscription. Closing twice is safe."""
        self.selection.close()
        self._mapped.close()


class RemoteStates(UpdateStream, StateReader):
    """Hidden states at the newest positions, received over gRPC.

    Rows that were read may be dropped, and with a window all rows before it are: so memory is
    bounded by what is still to be read. The event loop receives updates; one other thread at a time
    reads.
    """

    transport = "follow"
    committed = 0  # positions below this can be read, if they are kept, in tokens

    def __init__(self, connect: Callable[[], Any], subscribe: kv_pb2.FollowSubscribe) -> None:
        super().__init__(connect, subscribe)
        self._layers = tuple(subscribe.hidden_state_layers)
        self._max_rows = subscribe.hidden_state_window or MAX_POSITIONS
        self._lock = threading.Lock()
        self._start = 0
        self._rows: Tensor | None = None
        self._received = asyncio.Event()
        self._may_wait = True

    async def wait_for(self, committed: int, seconds: float) -> None:
        """See :class:`StateReader`.

        After a wait that timed out there is no other wait before the next update: a slow link
        delays one round only.
        """
        if not self._may_wait:
            return
        try:
            async with asyncio.timeout(seconds):
                while self.committed < committed and self._gone is None:
                    self._received.clear()
                    await self._received.wait()
        except TimeoutError:
            self._may_wait = False

    def read(self, begin: int, end: int) -> tuple[int, Tensor]:
        """See :class:`StateReader`. Drops the rows of positions below ``begin``."""
        with self._lock:
            if self._rows is None:
                return end, torch.empty(0, 0)
            first = min(end, max(begin, self._start))
            rows = self._rows[first - self._start : end - self._start].clone()
            if begin > self._start:
                # A copy, since a view would keep the dropped rows in memory.
                self._rows = self._rows[begin - self._start :].clone()
                self._start = begin
            return first, rows

    def close(self) -> None:
        """End the stream and drop the rows. Closing twice is safe, on any thread."""
        with self._lock:
            self._rows = None
        super().close()

    def _limit(self) -> int:
        return self._max_rows * len(self._layers)

    async def _receive(self, update: CacheUpdate) -> None:
        for message in update:
            if message.hidden_states:
                self._append(message, self._shape.result())
        committed = update[-1].committed_length
        if committed < self.committed:
            raise KvGone(f"{self.committed} positions were committed, and now {committed}")
        self.committed = committed
        self._acknowledge(update[-1].update_id)
        self._may_wait = True
        self._received.set()

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
            raise KvGone(f"the verifier sent invalid hidden states: {error}") from error
        with self._lock:
            if self._rows is not None and start == self._start + len(self._rows):
                rows, start = torch.cat([self._rows, rows]), self._start
            # Else they are the first, or the verifier no longer kept those in between.
            extra = max(0, len(rows) - self._max_rows)
            self._rows = rows[extra:].clone() if extra else rows
            self._start = start + extra
