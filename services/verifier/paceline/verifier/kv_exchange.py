"""The KvExchangeService: committed KV for drafters, by their read grants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import torch

from paceline.kvwire import WIRE_TYPES
from paceline.service import ServiceError
from paceline.service.locality import is_local_peer
from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.cache import CAPABILITY_BYTES, Cache
from paceline.verifier.errors import grant_not_found
from paceline.verifier.follow import FollowCounts, FollowStream
from paceline.verifier.follow_states import StateFeed
from paceline.verifier.kv.base import SequenceKv
from paceline.verifier.kv.pool import PAGE_TOKENS, PagedKv
from paceline.verifier.selection import (
    PageCollector,
    ScoreCollector,
    Scored,
    Selection,
    Streaming,
)
from paceline.verifier.store import CacheNotFound, CacheStore

MAX_FOLLOWERS = 16
"""Streams that may follow one cache."""

_DTYPES = {
    torch.float32: kv_pb2.KV_DTYPE_FLOAT32,
    torch.float16: kv_pb2.KV_DTYPE_FLOAT16,
    torch.bfloat16: kv_pb2.KV_DTYPE_BFLOAT16,
}


class KvExchangeServicer(kv_pb2_grpc.KvExchangeServiceServicer):
    """Gives holders of read grants committed KV. Nothing here changes a cache or its lease.

    Who may map: whoever shows the grant, calls from this machine, and can open the segment's file,
    which is the verifier's user alone. What is answered stays true as long as the generation does;
    what guards reading is the segment's header (:class:`paceline.shm.SegmentHeader`). Who may
    follow, from anywhere: whoever shows the grant.
    """

    def __init__(self, store: CacheStore, counts: FollowCounts | None = None) -> None:
        self._store = store
        self._counts = counts

    async def MapCache(
        self, request: kv_pb2.MapCacheRequest, context: Any
    ) -> kv_pb2.MapCacheResponse:
        """Where K and V of the wanted layers lie in shared memory."""
        if not is_local_peer(context.peer()):
            raise ServiceError.failed_precondition(
                "KV_NOT_LOCAL",
                f"shared memory is of use on the verifier's own machine only, and {context.peer()} "
                "is not it; use a drafter there, over loopback or a unix socket",
            )
        cache = self._find(request.read_grant)
        wanted = list(request.hidden_state_layers)
        layers: list[int] = []
        if request.layers or not wanted:
            layers = _layers(request.layers, self._store.layout.layers)
            kv = cache.sequence.segment
            if isinstance(kv, PagedKv) and kv.pool.exported is None:
                raise ServiceError.failed_precondition(
                    "KV_NOT_MAPPABLE",
                    "this verifier's KV lies in pages of its own; follow the cache",
                )
        answer = self._answer(cache, layers)
        answer.hidden_states.extend(_describe_states(cache.sequence.segment, wanted))
        return answer

    async def FollowCache(self, request_iterator: Any, context: Any) -> None:
        """Selected positions, and what changes about them after each round."""
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("event") != "subscribe":
            raise ServiceError.invalid_argument(
                "NOT_SUBSCRIBED", "the first message of a FollowCache stream must subscribe"
            )
        asked = first.subscribe
        cache = self._find(asked.read_grant)
        layout = self._store.layout
        layers: list[int] = []
        if asked.layers or not asked.hidden_state_layers:
            wanted = [n + layout.layers if n < 0 else n for n in asked.layers]
            layers = _layers(wanted, layout.layers)
        if layers and not asked.budget:
            raise ServiceError.invalid_argument(
                "NO_BUDGET", "the budget is 0; say how many positions are to be held at most"
            )
        if len(cache.sequence.listeners) >= MAX_FOLLOWERS:
            raise ServiceError.resource_exhausted(
                "TOO_MANY_FOLLOWERS",
                f"{MAX_FOLLOWERS} streams follow this cache already; end one of them",
            )
        own = _DTYPES[layout.dtype]
        stream = FollowStream(
            cache,
            layers,
            _selection(asked.policy, layers, cache.sequence.segment),
            asked.budget,
            None if asked.positions_only else _wire_dtype(asked.wire_dtype) or own,
            own,
            _state_feed(cache, asked),
            self._counts,
        )
        await stream.serve(context)

    def _find(self, read_grant: bytes) -> Cache:
        if len(read_grant) != CAPABILITY_BYTES:
            raise ServiceError.invalid_argument(
                "BAD_GRANT",
                f"the read grant has {len(read_grant)} bytes, expected {CAPABILITY_BYTES}; send "
                "the one that CreateCache answered",
            )
        try:
            return self._store.find_granted(read_grant)
        except CacheNotFound as error:
            raise grant_not_found() from error

    def _answer(self, cache: Cache, layers: Iterable[int]) -> kv_pb2.MapCacheResponse:
        segment = cache.sequence.segment
        return kv_pb2.MapCacheResponse(
            segments=[_describe(segment, layer, kind) for layer in layers for kind in (0, 1)],
            dtype=_DTYPES[segment.layout.dtype],
            committed_length=cache.sequence.committed,
            generation=cache.generation,
            lease_ms=round(self._store.lease_left(cache) * 1000),
        )


def _layers(wanted: Iterable[int], count: int) -> list[int]:
    """The layers asked for, each once; all if none was named."""
    layers = list(dict.fromkeys(wanted))
    for layer in layers:
        if not 0 <= layer < count:
            raise ServiceError.invalid_argument(
                "LAYER_OUT_OF_RANGE",
                f"layer {layer} was asked for, but the model has {count}, counted from 0; is the "
                "drafter made for another target?",
            )
    return layers or list(range(count))


def _selection(
    policy: kv_pb2.SelectionPolicy, layers: Sequence[int], segment: SequenceKv
) -> Selection:
    if policy in (kv_pb2.SELECTION_POLICY_UNSPECIFIED, kv_pb2.SELECTION_POLICY_STREAMING):
        return Streaming(len(layers))
    if policy == kv_pb2.SELECTION_POLICY_QUEST:
        return Scored(PageCollector(layers, segment))
    if policy in (kv_pb2.SELECTION_POLICY_VERIFIED, kv_pb2.SELECTION_POLICY_CHUNK_TOPK):
        cumulative = policy == kv_pb2.SELECTION_POLICY_CHUNK_TOPK
        return Scored(ScoreCollector(layers, segment, cumulative=cumulative))
    raise ServiceError.invalid_argument(
        "BAD_POLICY", f"there is no selection policy {policy}, expected 0 to 4"
    )


def _wire_dtype(asked: kv_pb2.KvDtype) -> kv_pb2.KvDtype:
    if asked and asked not in WIRE_TYPES:
        raise ServiceError.invalid_argument(
            "BAD_WIRE_DTYPE", f"there is no KV type {asked}, expected one of {sorted(WIRE_TYPES)}"
        )
    return asked


def _state_feed(cache: Cache, asked: kv_pb2.FollowSubscribe) -> StateFeed | None:
    layers = list(dict.fromkeys(asked.hidden_state_layers))
    if not layers:
        return None
    _check_kept(cache.sequence.segment, layers)
    return StateFeed(cache, layers, asked.hidden_state_window, asked.hidden_state_start)


def _check_kept(segment: SequenceKv, wanted: Iterable[int]) -> None:
    kept = segment.taps.layout.taps.layers if segment.taps is not None else ()
    if missing := sorted(set(wanted) - set(kept)):
        raise ServiceError.failed_precondition(
            "HIDDEN_STATES_NOT_KEPT",
            f"hidden states of layers {missing} were asked for, but this cache keeps those of "
            f"{list(kept)}; create it with hidden_state_layers",
        )


def _describe_states(segment: SequenceKv, wanted: Iterable[int]) -> list[kv_pb2.HiddenStateSegment]:
    """Where the hidden states of the wanted layers lie."""
    _check_kept(segment, wanted)
    return [
        kv_pb2.HiddenStateSegment(
            layer=layer,
            posix=_memory(segment),
            offset=segment.taps_offset(layer),
            position_stride=segment.taps.layout.row_bytes,
            hidden_size=segment.taps.layout.hidden,
            slots=segment.taps.layout.slots,
        )
        for layer in dict.fromkeys(wanted)
        if segment.taps is not None
    ]


def _memory(segment: SequenceKv) -> kv_pb2.PosixSharedMemory:
    return kv_pb2.PosixSharedMemory(name=f"/{segment.name}", byte_size=segment.file_bytes)


def _describe(segment: SequenceKv, layer: int, kind: int) -> kv_pb2.KvSegment:
    """Keys (``kind`` 0) or values (1) of a layer."""
    layout = segment.layout
    if isinstance(segment, PagedKv):
        return _describe_pages(segment, layer, kind)
    return kv_pb2.KvSegment(
        layer=layer,
        is_value=bool(kind),
        posix=_memory(segment),
        offset=layout.offset((layer * 2 + kind) * layout.kv_heads, segment.capacity),
        head_stride=segment.capacity * layout.row_bytes,
        position_stride=layout.row_bytes,
        heads=layout.kv_heads,
        head_dim=layout.head_dim,
        capacity=segment.capacity,
    )


def _describe_pages(segment: PagedKv, layer: int, kind: int) -> kv_pb2.KvSegment:
    """The same of a cache in pages of a pool on a GPU."""
    layout, memory = segment.layout, segment.pool.exported
    assert memory is not None, "the pool is exported"
    plane_bytes = PAGE_TOKENS * layout.row_bytes
    return kv_pb2.KvSegment(
        layer=layer,
        is_value=bool(kind),
        cuda_ipc=kv_pb2.CudaIpcMemory(
            device_uuid=memory.device_uuid,
            handle=memory.handle,
            byte_size=memory.bytes.numel(),
        ),
        offset=(layer * 2 + kind) * layout.kv_heads * plane_bytes,
        head_stride=plane_bytes,
        position_stride=layout.row_bytes,
        heads=layout.kv_heads,
        head_dim=layout.head_dim,
        capacity=segment.capacity,
        page_size=PAGE_TOKENS,
        page_stride=segment.pool.page_bytes,
        page_table_memory=_memory(segment),
        page_table_offset=segment.table_offset,
    )
