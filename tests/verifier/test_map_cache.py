"""MapCache: what the holder of a read grant can do."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from test_store import new_store
from verifier_support import LAYOUT, Client, Clock, failure, reason_of, serving, until

from paceline.service import ServiceError
from paceline.v1 import kv_pb2, kv_pb2_grpc, verifier_pb2
from paceline.verifier.engine.sequence import GenerationParams
from paceline.verifier.rpc.kv_exchange import KvExchangeServicer
from paceline.verifier.store import CacheNotFound

PROMPT = [3, 1, 4, 1, 5]
CODE = grpc.StatusCode


def exchange(client: Client) -> Any:
    return kv_pb2_grpc.KvExchangeServiceStub(client.channel)  # type: ignore[no-untyped-call]


def content(name: str) -> bytes:
    return Path(f"/dev/shm{name}").read_bytes()


async def map_cache(client: Client, read_grant: bytes) -> bytes:
    """The content of the file that the verifier names."""
    request = kv_pb2.MapCacheRequest(read_grant=read_grant)
    response: kv_pb2.MapCacheResponse = await exchange(client).MapCache(request)
    return content(response.file.name)


def epoch(file: bytes) -> int:
    (found,) = struct.unpack_from("=Q", file, 8)
    assert isinstance(found, int)
    return found


async def test_the_header_leads_to_every_element(client: Client) -> None:
    """It has the layout, the committed length and the generation."""
    created = await client.create(PROMPT)
    (cache,) = client.service.store
    file = await map_cache(client, created.read_grant)
    assert file[:8] == struct.pack("=Q", int.from_bytes(b"PACEKV\0\2", "big"))
    assert struct.unpack_from("=2Q", file, 8) == (created.epoch, len(PROMPT))
    (size,) = struct.unpack_from("=Q", file, 24)
    layout = kv_pb2.SegmentLayout.FromString(file[64 : 64 + size])
    assert layout.dtype == kv_pb2.KV_DTYPE_FLOAT32
    assert not layout.HasField("pages")
    shape = (layout.layers, 2, layout.heads, layout.capacity, layout.head_dim)
    numbers = torch.frombuffer(bytearray(file[4096:]), dtype=torch.float32)
    stored = numbers[: math.prod(shape)].view(shape)
    for layer in range(LAYOUT.layers):
        for kind, theirs in enumerate(cache.sequence.segment.layer(layer)):
            assert stored[layer, kind].shape == theirs.shape
            ours = stored[layer, kind, :, : len(PROMPT)]
            assert torch.equal(ours, theirs[:, : len(PROMPT)])
    await client.release(created.handle)


async def test_refusals(client: Client) -> None:
    created, other = await client.create(PROMPT), await client.create(PROMPT)
    assert epoch(await map_cache(client, other.read_grant)) == other.epoch
    await client.release(other.handle)
    for grant, expected in (
        (created.handle, (CODE.NOT_FOUND, "CACHE_NOT_FOUND")),
        (other.read_grant, (CODE.NOT_FOUND, "CACHE_NOT_FOUND")),
        (bytes(16), (CODE.NOT_FOUND, "CACHE_NOT_FOUND")),
        (b"", (CODE.INVALID_ARGUMENT, "BAD_GRANT")),
        (created.read_grant + b"x", (CODE.INVALID_ARGUMENT, "BAD_GRANT")),
    ):
        request = kv_pb2.MapCacheRequest(read_grant=grant)
        error = await failure(exchange(client).MapCache(request))
        assert (error.code(), reason_of(error)) == expected
    await client.release(created.handle)


async def test_the_grant_does_nothing_else(client: Client) -> None:
    """It neither releases nor renews; its holder need not have created the cache."""
    created = await client.create(PROMPT)
    (cache,) = client.service.store
    assert not await client.release(created.read_grant)
    renew = verifier_pb2.RenewLeaseRequest(handle=created.read_grant)
    assert reason_of(await failure(client.stub.RenewLease(renew))) == "CACHE_NOT_FOUND"
    request = kv_pb2.MapCacheRequest(read_grant=created.read_grant)
    metadata = (("authorization", "Bearer somebody-else"),)
    answer = await exchange(client).MapCache(request, metadata=metadata)
    assert answer.file.name == f"/{cache.sequence.segment.name}"
    assert await client.release(created.handle)


async def test_mapping_does_not_keep_a_cache_alive(
    model: Path, tmp_path: Path, clock: Clock
) -> None:
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28, lease_seconds=0.3) as client:
        created = await client.create(PROMPT)
        for _ in range(2):
            await map_cache(client, created.read_grant)
            clock.now += 0.2
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await map_cache(client, created.read_grant)
        assert error.value.code() is CODE.NOT_FOUND
        await until(lambda: len(client.service.store) == 0)


async def test_an_expired_lease_ends_access_before_the_sweep() -> None:
    clock = Clock()
    store = new_store(clock)
    cache = await store.admit(GenerationParams((1,), length_limit=9), "me")
    clock.now = 6.0
    assert store.find_granted(cache.read_grant) is cache
    clock.now = 10.0
    with pytest.raises(CacheNotFound):
        store.find_granted(cache.read_grant)
    assert await store.sweep() == 1
    store.check_integrity()


async def test_callers_on_other_machines_are_refused() -> None:
    store = new_store(Clock())
    cache = await store.admit(GenerationParams((1,), length_limit=9), "me")
    servicer = KvExchangeServicer(store)
    request = kv_pb2.MapCacheRequest(read_grant=cache.read_grant)
    away, here = (
        SimpleNamespace(peer=lambda peer=peer: peer)
        for peer in ("ipv4:10.1.2.3:4567", "ipv4:127.0.0.1:4567")
    )
    with pytest.raises(ServiceError) as error:
        await servicer.MapCache(request, away)
    assert (error.value.code, error.value.reason) == (CODE.FAILED_PRECONDITION, "KV_NOT_LOCAL")
    answer = await servicer.MapCache(request, here)
    assert answer.file.name == f"/{cache.sequence.segment.name}"
    await store.release(cache)
