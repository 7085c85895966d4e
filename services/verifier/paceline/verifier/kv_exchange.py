"""The KvExchangeService: committed KV for drafters, by their read grants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.service import ServiceError
from paceline.service.locality import is_local_peer
from paceline.v1 import kv_pb2, kv_pb2_grpc
from paceline.verifier.cache import CAPABILITY_BYTES, Cache
from paceline.verifier.failures import grant_not_found
from paceline.verifier.kv.segment import Segment
from paceline.verifier.store import CacheNotFound, CacheStore

_DTYPES = {
    torch.float32: kv_pb2.KV_DTYPE_FLOAT32,
    torch.float16: kv_pb2.KV_DTYPE_FLOAT16,
    torch.bfloat16: kv_pb2.KV_DTYPE_BFLOAT16,
}


class KvExchangeServicer(kv_pb2_grpc.KvExchangeServiceServicer):
    """Tells holders of read grants where KV lies. Nothing here changes a cache or its lease.

    Who may read: whoever shows the grant, calls from this machine, and can open the segment's file,
    which is the verifier's user alone. What is answered stays true as long as the generation does;
    what guards reading is the segment's header (:class:`paceline.shm.SegmentHeader`).
    """

    def __init__(self, store: CacheStore) -> None:
        self._store = store

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
        layers = _layers(request.layers, self._store.layout.layers)
        return self._answer(cache, layers)

    async def FollowCache(self, request_iterator: Any, context: Any) -> None:
        """Not built yet."""
        raise ServiceError.unimplemented(
            "FOLLOW_CACHE_NOT_BUILT",
            "this verifier sends no copies of its KV yet; use a drafter on its own machine, or one "
            "that needs tokens only",
        )

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
    if layers and max(layers) >= count:
        raise ServiceError.invalid_argument(
            "LAYER_OUT_OF_RANGE",
            f"layer {max(layers)} was asked for, but the model has {count}, counted from 0; is the "
            "drafter made for another target?",
        )
    return layers or list(range(count))


def _describe(segment: Segment, layer: int, kind: int) -> kv_pb2.KvSegment:
    """Keys (``kind`` 0) or values (1) of a layer."""
    layout = segment.layout
    return kv_pb2.KvSegment(
        layer=layer,
        is_value=bool(kind),
        posix=kv_pb2.PosixSharedMemory(name=f"/{segment.name}", byte_size=segment.byte_size),
        offset=layout.offset((layer * 2 + kind) * layout.kv_heads, segment.capacity),
        head_stride=segment.capacity * layout.row_bytes,
        position_stride=layout.row_bytes,
        heads=layout.kv_heads,
        head_dim=layout.head_dim,
        capacity=segment.capacity,
    )
