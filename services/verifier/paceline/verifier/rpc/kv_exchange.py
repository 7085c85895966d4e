"""The KvExchangeService: committed KV for drafters that hold a read grant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from paceline.kv.policies import load_policy
from paceline.kv.selection import SelectionPolicy, Streaming
from paceline.kv.wire import WIRE_TYPES, cache_dtype
from paceline.service import ServiceError
from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.cache import CAPABILITY_BYTES, Cache
from paceline.verifier.kv.base import SequenceKv
from paceline.verifier.rpc.errors import grant_not_found
from paceline.verifier.rpc.follow import FollowCounts, FollowStream, StateFeed
from paceline.verifier.store import CacheNotFound, CacheStore

MAX_FOLLOWERS = 16
"""Maximum number of FollowCache streams per cache."""


class KvExchangeServicer(kv_pb2_grpc.KvExchangeServiceServicer):
    """Gives holders of read grants access to committed KV. Changes neither a cache nor its lease.

    A cache may be followed from anywhere by a caller that has its read grant. On the same host it
    can be mapped instead, over the Unix socket of the draft exchange (``rpc/exchange.py``).
    """

    def __init__(self, store: CacheStore, counts: FollowCounts | None = None) -> None:
        self._store = store
        self._counts = counts

    async def FollowCache(self, request_iterator: Any, context: Any) -> None:
        """Stream selected positions, and their changes after each round."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("event") != "subscribe":
            raise ServiceError.invalid_argument(
                "NOT_SUBSCRIBED", "the first message of a FollowCache stream must subscribe"
            )
        request = first.subscribe
        cache = self._find(request.read_grant)
        segment = cache.sequence.segment
        layers: list[int] = []
        if request.layers or not request.hidden_state_layers:
            count = segment.layout.layers
            layers = _layers((n + count if n < 0 else n for n in request.layers), count)
            if not request.budget:
                raise ServiceError.invalid_argument(
                    "NO_BUDGET", "the budget is 0, expected the most positions per layer"
                )
        if len(cache.sequence.listeners) >= MAX_FOLLOWERS:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_FOLLOWERS",
                f"{MAX_FOLLOWERS} streams follow this cache already; end one of them",
            )
        wire = request.wire_dtype or cache_dtype(segment.layout.dtype)
        if wire not in WIRE_TYPES:
            raise ServiceError.invalid_argument(
                "BAD_WIRE_DTYPE", f"there is no KV type {wire}, expected one of {[*WIRE_TYPES]}"
            )
        stream = FollowStream(
            cache,
            layers,
            _policy(request.policy, segment, layers),
            request.budget,
            None if request.positions_only else wire,
            _state_feed(cache, request),
            self._counts,
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
            raise grant_not_found() from error


def _layers(requested: Iterable[int], count: int) -> list[int]:
    """Returns the requested layers, each once; all if none is named."""
    layers = list(dict.fromkeys(requested))
    for layer in layers:
        if not 0 <= layer < count:
            raise ServiceError.invalid_argument(
                "LAYER_OUT_OF_RANGE",
                f"layer {layer} was requested, but the model has {count}, counted from 0; was the "
                "drafter made for another target?",
            )
    return layers or list(range(count))


def _policy(name: str, segment: SequenceKv, layers: Sequence[int]) -> SelectionPolicy:
    if not layers:
        return Streaming(segment, layers)
    try:
        factory = load_policy(name)
    except ValueError as error:
        raise ServiceError.invalid_argument("BAD_POLICY", str(error)) from error
    return factory(segment, layers)


def _state_feed(cache: Cache, request: kv_pb2.FollowSubscribe) -> StateFeed | None:
    layers = list(dict.fromkeys(request.hidden_state_layers))
    if not layers:
        return None
    _check_kept(cache.sequence.segment, layers)
    return StateFeed(cache, layers, request.hidden_state_window, request.hidden_state_start)


def _check_kept(segment: SequenceKv, requested: Iterable[int]) -> None:
    kept = segment.taps.layout.taps.layers if segment.taps is not None else ()
    if missing := sorted(set(requested) - set(kept)):
        raise ServiceError.failed_precondition(
            "HIDDEN_STATES_NOT_KEPT",
            f"hidden states of layers {missing} were requested, but this cache keeps those of "
            f"{list(kept)}; create it with hidden_state_layers",
        )
