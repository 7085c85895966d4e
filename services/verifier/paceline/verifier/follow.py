"""One FollowCache stream: what its follower holds, and what is sent to it next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from torch import Tensor

from paceline.kvwire import encode, position_bytes
from paceline.service import ServiceError
from paceline.v1 import kv_pb2
from paceline.verifier.cache import Cache
from paceline.verifier.errors import grant_not_found
from paceline.verifier.follow_states import StateFeed
from paceline.verifier.selection import Selection

MESSAGE_BYTES = 1 << 20
"""KV or hidden states in one message: so few that the event loop is never held up for long."""

_POSITION_BYTES = 4

UPDATES_AHEAD = 2
"""Updates on their way that the follower has not taken in yet. A slower link skips rounds."""


@dataclass(slots=True)
class FollowCounts:
    """What all streams of a verifier come to. The event loop counts, any thread may read."""

    streams: int = 0
    """Open now."""
    updates: int = 0
    """Begun to be sent."""
    bytes: int = 0
    """Sent, all of the messages."""


class FollowStream:
    """Keeps one follower in step with a cache, as fast as the follower takes it in.

    Belongs to the event loop. It reads committed positions only, which never change, and keeps no
    view of them over an await; after each it looks whether the cache was released. A release does
    not cut a write short: a call whose first message is cut can no more be given a status.
    """

    def __init__(
        self,
        cache: Cache,
        layers: Sequence[int],
        selection: Selection,
        budget: int,
        wire: kv_pb2.KvDtype | None,
        cache_dtype: kv_pb2.KvDtype,
        states: StateFeed | None = None,
        counts: FollowCounts | None = None,
    ) -> None:
        """Begin with a follower that holds nothing.

        Args:
            cache: What is followed.
            layers: Layers sent, counted from 0.
            selection: Chooses positions.
            budget: Most positions of a layer. Unit: tokens.
            wire: Type of the chunks; None: they carry positions only.
            cache_dtype: Type of the cache.
            states: Sends hidden states along; None: none are sent.
            counts: Where it is counted; None: nowhere that anybody sees.
        """
        layout = cache.sequence.segment.layout
        self._cache = cache
        self._states = states
        self._layers = layers
        self._selection = selection
        self._budget = budget
        self._wire = wire
        self._held = [torch.empty(0, dtype=torch.int64) for _ in layers]
        self._shape = kv_pb2.KvShape(
            layers=len(layers),
            heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=cache_dtype,
            wire_dtype=wire or kv_pb2.KV_DTYPE_UNSPECIFIED,
            hidden_size=0 if states is None else states.hidden,
        )
        row = _POSITION_BYTES
        if wire is not None:
            row = position_bytes(layout.kv_heads, layout.head_dim, wire)
        self._most = max(1, MESSAGE_BYTES // row)
        self._counts = FollowCounts() if counts is None else counts
        self._sent = 0
        self._acknowledged = 0
        self._told: tuple[int, int] | None = None
        self._news = asyncio.Event()
        self._left = False

    async def serve(self, context: Any) -> None:
        """Send the shape, then updates until the follower leaves or the cache is gone.

        Raises:
            ServiceError: The cache is gone, or the follower sent what it must not.
        """
        sequence, collectors = self._cache.sequence, self._selection.collectors
        sequence.listeners.add(self._news.set)
        sequence.collectors += collectors
        self._counts.streams += 1
        reading = asyncio.create_task(self._read(context))
        try:
            await self._send(context, self._message(0, shape=self._shape))
            while not self._left:
                self._news.clear()
                self._check()
                if self._due:
                    for message in self._update():
                        await self._send(context, message)
                else:
                    await self._news.wait()
            await reading
        finally:
            self._counts.streams -= 1
            sequence.listeners.discard(self._news.set)
            for collector in collectors:
                sequence.collectors.remove(collector)
            reading.cancel()

    async def _send(self, context: Any, message: kv_pb2.FollowCacheResponse) -> None:
        await context.write(message)
        self._counts.bytes += message.ByteSize()

    def _check(self) -> None:
        """Raise unless the cache is still there."""
        if self._cache.released:
            raise grant_not_found()

    @property
    def _due(self) -> bool:
        """Whether there is something to tell, and room for it on the way."""
        news = (self._cache.sequence.committed, self._budget)
        return self._told != news and self._sent - self._acknowledged < UPDATES_AHEAD

    async def _read(self, context: Any) -> None:
        """Take in acknowledgements."""
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                if request.WhichOneof("event") != "ack":
                    raise ServiceError.invalid_argument(
                        "ALREADY_SUBSCRIBED", "after the first message every one must be an ack"
                    )
                if not self._acknowledged < request.ack.update_id <= self._sent:
                    raise ServiceError.invalid_argument(
                        "BAD_ACK",
                        f"update {request.ack.update_id} was acknowledged, expected one of "
                        f"{self._acknowledged + 1} to {self._sent}",
                    )
                self._acknowledged = request.ack.update_id
                self._budget = request.ack.budget or self._budget
                self._news.set()
        finally:
            self._left = True
            self._news.set()

    def _update(self) -> Iterator[kv_pb2.FollowCacheResponse]:
        """The messages of the next update; each is made when the one before it was written."""
        committed = self._cache.sequence.committed
        self._told = (committed, self._budget)
        self._sent += 1
        self._counts.updates += 1
        chosen = self._selection.choose(committed, self._budget)
        message = self._message(committed)
        fresh: list[tuple[int, Tensor]] = []
        for index, (held, wanted) in enumerate(zip(self._held, chosen, strict=True)):
            gone = held[~torch.isin(held, wanted)]
            if len(gone):
                message.drops.add(layer=index, positions=gone.tolist())
            new = wanted[~torch.isin(wanted, held)]
            fresh += [(index, part) for part in new.split(self._most)]
        self._held = chosen
        room = self._most
        for index, positions in fresh:
            if not len(positions):
                continue
            if room < len(positions) and message.chunks:
                yield message
                self._check()
                message, room = self._message(committed), self._most
            message.chunks.append(self._chunk(index, positions))
            room -= len(positions)
        if self._states is not None:
            for piece in self._states.pieces(committed, MESSAGE_BYTES):
                if message.chunks or message.hidden_states:
                    yield message
                    self._check()
                    message = self._message(committed)
                message.hidden_states.extend(piece)
        message.last = True
        yield message

    def _message(self, committed: int, **fields: Any) -> kv_pb2.FollowCacheResponse:
        return kv_pb2.FollowCacheResponse(
            update_id=self._sent,
            committed_length=committed,
            generation=self._cache.generation,
            **fields,
        )

    def _chunk(self, index: int, positions: Tensor) -> kv_pb2.KvChunk:
        if self._wire is None:
            return kv_pb2.KvChunk(layer=index, positions=positions.tolist())
        keys, values = self._cache.sequence.segment.gather(self._layers[index], positions)
        key_bytes, key_scales = encode(keys, self._wire)
        value_bytes, value_scales = encode(values, self._wire)
        return kv_pb2.KvChunk(
            layer=index,
            positions=positions.tolist(),
            keys=key_bytes,
            values=value_bytes,
            key_scales=key_scales,
            value_scales=value_scales,
        )
