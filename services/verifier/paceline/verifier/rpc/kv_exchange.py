"""The KvExchangeService: committed KV for drafters that hold a read grant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import torch
from torch import Tensor

from paceline.kv.policies import load_policy
from paceline.kv.segment import TAP_AHEAD
from paceline.kv.selection import InWindows, SelectionPolicy, Streaming
from paceline.kv.wire import cache_dtype, encode, encode_rows, position_bytes
from paceline.service import ServiceError
from paceline.v1 import kv_pb2, kv_pb2_grpc, verifier_pb2
from paceline.verifier.kv.base import SequenceKv
from paceline.verifier.rpc.streams import first_message, write
from paceline.verifier.store import CAPABILITY_BYTES, Cache, CacheNotFound, CacheStore

# Maximum size of KV or hidden states in one message, so that encoding it does not block the event
# loop for long. Unit: bytes.
MESSAGE_BYTES = 1 << 20

# Maximum number of updates sent that are not acknowledged yet. A slower link skips rounds.
UPDATES_AHEAD = 2

_POSITION_BYTES = 4
MAX_FOLLOWERS = 16  # maximum number of FollowCache streams per cache


class StateFeed:
    """The hidden states that one drafter is sent. Belongs to the event loop.

    It copies rows of committed positions while the engine may write rows of newer positions into
    the same ring. As every reader (see :class:`paceline.kv.segment.SegmentHeader`), it reads the
    committed length again after the copy and drops rows that may have been overwritten.
    """

    def __init__(self, cache: Cache, layers: Sequence[int], window: int) -> None:
        """Start from a drafter that has no rows. It is sent layers that the cache keeps, of the
        newest positions of ``window`` only; 0: of all. Unit: tokens."""
        self._sequence = cache.sequence
        self._layers = layers
        self._window = window
        self._next = 0
        assert cache.sequence.kv.taps is not None, "checked when it was subscribed"
        layout = cache.sequence.kv.taps.layout
        self.hidden = layout.hidden
        self.row_bytes = len(layers) * layout.row_bytes

    def pieces(
        self, committed: int, message_bytes: int
    ) -> Iterator[list[verifier_pb2.HiddenStates]]:
        """Yield the rows up to a committed length, in pieces of one message each.

        A piece has at most ``message_bytes``, unless one position is larger. Between two pieces the
        caller may wait, but the cache must not be released.
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
        planes = self._sequence.kv.taps
        if planes is None:
            return []
        begin = max(begin, planes.first_kept(self._sequence.committed))
        copies = planes.copy(self._layers, begin, end)
        overwritten = self._sequence.committed + TAP_AHEAD - planes.layout.slots
        first = max(begin, overwritten)
        return [
            verifier_pb2.HiddenStates(
                layer=layer, start=first, count=end - first, data=encode_rows(rows[first - begin :])
            )
            for layer, rows in zip(self._layers, copies, strict=True)
            if first < end
        ]


class FollowStream:
    """Sends the changes of a cache to one drafter, as fast as the drafter acknowledges them.

    Belongs to the event loop. It reads committed positions only, which never change, and keeps no
    view of them over an await; after each await it checks whether the cache was released. A release
    does not interrupt a write: a call whose first message is interrupted can carry no status.
    """

    def __init__(
        self,
        cache: Cache,
        layers: Sequence[int],
        policy: SelectionPolicy,
        budget: int,
        positions_only: bool = False,
        states: StateFeed | None = None,
    ) -> None:
        """Start from a drafter that has no positions.

        ``policy`` chooses at most ``budget`` positions of each of the layers, which are counted
        from 0. With ``positions_only``, chunks carry no keys and values.
        """
        layout = cache.sequence.kv.layout
        wire = cache_dtype(layout.dtype)
        self._cache = cache
        self._states = states
        self._layers = layers
        self._policy = policy
        self.budget = budget
        self._positions_only = positions_only
        self._positions = [torch.empty(0, dtype=torch.int64) for _ in layers]
        self.shape = kv_pb2.KvShape(
            layers=len(layers),
            heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=cache_dtype(layout.hidden_dtype),
            wire_dtype=kv_pb2.KV_DTYPE_UNSPECIFIED if positions_only else wire,
            hidden_size=0 if states is None else states.hidden,
        )
        row = _POSITION_BYTES
        if not positions_only:
            row = position_bytes(layout.kv_heads, layout.head_dim, wire)
        self._message_positions = max(1, MESSAGE_BYTES // row)
        self._sent = 0
        self._acknowledged = 0
        self._sent_at: tuple[int, int] | None = None  # committed length and budget
        self._resized = 0  # updates for another budget since a token was committed
        self._changed = asyncio.Event()
        self._ended = False

    async def serve(self, context: Any) -> None:
        """Send the shape, then updates until the drafter ends the stream or the cache is gone.
        Raises ``ServiceError`` if the cache is gone, or the drafter sent an invalid message."""
        sequence, observer = self._cache.sequence, self._policy.observer
        sequence.listeners.add(self._changed.set)
        if observer is not None:
            sequence.observers.append(observer)
        reading = asyncio.create_task(self._read(context))
        try:
            await write(context, self._message(0, shape=self.shape))
            while not self._ended:
                self._changed.clear()
                self._check()
                if self._due:
                    for message in self.update():
                        await write(context, message)
                else:
                    await self._changed.wait()
            await reading
        finally:
            sequence.listeners.discard(self._changed.set)
            if observer is not None:
                sequence.observers.remove(observer)
            reading.cancel()

    def _check(self) -> None:
        if self._cache.released:
            raise _grant_not_found()

    @property
    def _due(self) -> bool:
        """Whether something has changed, and another update may be sent."""
        now = (self._cache.sequence.committed, self.budget)
        if self._sent_at == now or self._sent - self._acknowledged >= UPDATES_AHEAD:
            return False
        return self._committed_since or self._resized < UPDATES_AHEAD

    @property
    def _committed_since(self) -> bool:
        """Whether tokens were committed since the last update."""
        return self._sent_at is None or self._sent_at[0] != self._cache.sequence.committed

    async def _read(self, context: Any) -> None:
        """Read acknowledgements."""
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
                self.budget = request.ack.budget or self.budget
                self._changed.set()
        finally:
            self._ended = True
            self._changed.set()

    def update(self) -> Iterator[kv_pb2.FollowCacheResponse]:
        """Yield the messages of the next update; each is made after the previous one was sent."""
        committed = self._cache.sequence.committed
        self._resized = 0 if self._committed_since else self._resized + 1
        self._sent_at = (committed, self.budget)
        self._sent += 1
        chosen = self._policy.choose(committed, self.budget) if self._layers else []
        message = self._message(committed)
        added: list[tuple[int, Tensor]] = []
        for index, (before, after) in enumerate(zip(self._positions, chosen, strict=True)):
            dropped = before[~torch.isin(before, after)]
            if len(dropped):
                message.drops.add(layer=index, positions=dropped.tolist())
            new = after[~torch.isin(after, before)]
            added += [(index, part) for part in new.split(self._message_positions) if len(part)]
        self._positions = chosen
        room = self._message_positions
        for index, positions in added:
            if room < len(positions) and message.chunks:
                yield message
                self._check()
                message, room = self._message(committed), self._message_positions
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
            update_id=self._sent, committed_length=committed, epoch=self._cache.epoch, **fields
        )

    def _chunk(self, index: int, positions: Tensor) -> kv_pb2.KvChunk:
        chunk = kv_pb2.KvChunk(layer=index, positions=positions.tolist())
        if not self._positions_only:
            keys, values = self._cache.sequence.kv.gather(self._layers[index], positions)
            chunk.keys, key_scales = encode(keys)
            chunk.values, value_scales = encode(values)
            chunk.key_scales.extend(key_scales)
            chunk.value_scales.extend(value_scales)
        return chunk


class KvExchangeServicer(kv_pb2_grpc.KvExchangeServiceServicer):
    """Gives holders of read grants access to committed KV. Changes neither a cache nor its lease.

    A cache may be followed from anywhere by a caller that has its read grant. On the same host it
    can be mapped instead, over the Unix socket of the draft exchange (``rpc/exchange.py``).
    """

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    async def FollowCache(self, request_iterator: Any, context: Any) -> None:
        """Stream selected positions, and their changes after each round."""
        first = await first_message(context)
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("event") != "subscribe":
            raise ServiceError.invalid_argument(
                "NOT_SUBSCRIBED", "the first message of a FollowCache stream must subscribe"
            )
        request = first.subscribe
        cache = self._find(request.read_grant)
        kv = cache.sequence.kv
        layers: list[int] = []
        if request.layers or not request.hidden_state_layers:
            layers = _layers(request.layers, kv.layout.layers)
            if not request.budget:
                raise ServiceError.invalid_argument(
                    "NO_BUDGET", "the budget is 0, expected the most positions per layer"
                )
        if len(cache.sequence.listeners) >= MAX_FOLLOWERS:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_FOLLOWERS",
                f"{MAX_FOLLOWERS} streams follow this cache already; end one of them",
            )
        scored = cache.policies.pop((request.policy, tuple(layers)), None)
        stream = FollowStream(
            cache,
            layers,
            scored or _policy(request.policy, kv, layers),
            request.budget,
            request.positions_only,
            _state_feed(cache, request),
        )
        await stream.serve(context)

    def _find(self, read_grant: bytes) -> Cache:
        if len(read_grant) != CAPABILITY_BYTES:
            raise ServiceError.invalid_argument(
                "BAD_GRANT",
                f"the read grant has {len(read_grant)} bytes, expected {CAPABILITY_BYTES}; send "
                "the one that CreateCache returned",
            )
        try:
            return self._store.find_granted(read_grant)
        except CacheNotFound as error:
            raise _grant_not_found() from error


def score_prompt(cache: Cache, scored: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Let the prompt's prefill score positions for the policies and layers that may follow it.

    Those that no stream could follow are left out: its drafter is told why.
    """
    kv = cache.sequence.kv
    for name, requested in scored:
        try:
            layers = _layers(requested, kv.layout.layers)
            policy = _policy(name, kv, layers)
        except ServiceError:
            continue
        cache.policies[name, tuple(layers)] = policy
        if policy.observer is not None:
            cache.sequence.prompt_observers.append(policy.observer)


def _layers(requested: Iterable[int], count: int) -> list[int]:
    """Return the requested layers, each once; all if none is named. -1 is the last one."""
    layers = list(dict.fromkeys(n + count if n < 0 else n for n in requested))
    for layer in layers:
        if not 0 <= layer < count:
            raise ServiceError.invalid_argument(
                "LAYER_OUT_OF_RANGE",
                f"layer {layer} was requested, but the model has {count}, counted from 0; was the "
                "drafter made for another target?",
            )
    return layers or list(range(count))


def _policy(name: str, kv: SequenceKv, layers: Sequence[int]) -> SelectionPolicy:
    if not layers:
        return Streaming(kv, layers)
    try:
        factory = load_policy(name)
    except ValueError as error:
        raise ServiceError.invalid_argument("BAD_POLICY", str(error)) from error
    windowed = [bool(kv.layout.windows and kv.layout.windows[layer]) for layer in layers]
    if all(windowed):
        return Streaming(kv, layers)
    dense = [layer for layer, in_window in zip(layers, windowed, strict=True) if not in_window]
    policy = factory(kv, dense)
    return InWindows(policy, windowed) if any(windowed) else policy


def _state_feed(cache: Cache, request: kv_pb2.FollowSubscribe) -> StateFeed | None:
    layers = list(dict.fromkeys(request.hidden_state_layers))
    taps = cache.sequence.kv.taps
    kept = () if taps is None else taps.layout.taps.layers
    if missing := sorted(set(layers) - set(kept)):
        raise ServiceError.failed_precondition(
            "HIDDEN_STATES_NOT_KEPT",
            f"hidden states of layers {missing} were requested, but this cache keeps those of "
            f"{list(kept)}; create it with hidden_state_layers",
        )
    return StateFeed(cache, layers, request.hidden_state_window) if layers else None


def _grant_not_found() -> ServiceError:
    """Return the same error for unknown, expired and released grants."""
    return ServiceError.not_found(
        "CACHE_NOT_FOUND",
        "no cache has this read grant: it was released, its lease expired, or the verifier was "
        "restarted; attach again with the grant of the cache in use",
    )
