"""MapCache: what the holder of a read grant can do."""

from __future__ import annotations

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
from paceline.verifier.engine.sequence import Generation
from paceline.verifier.rpc.kv_exchange import KvExchangeServicer
from paceline.verifier.store import CacheNotFound

PROMPT = [3, 1, 4, 1, 5]
CODE = grpc.StatusCode


def exchange(client: Client) -> Any:
    return kv_pb2_grpc.KvExchangeServiceStub(client.channel)  # type: ignore[no-untyped-call]


def content(name: str) -> bytes:
    return Path(f"/dev/shm{name}").read_bytes()


async def map_cache(client: Client, read_grant: bytes, *layers: int) -> kv_pb2.MapCacheResponse:
    request = kv_pb2.MapCacheRequest(read_grant=read_grant, layers=layers)
    response: kv_pb2.MapCacheResponse = await exchange(client).MapCache(request)
    return response


async def test_the_answer_leads_to_every_element(client: Client) -> None:
    """By offsets and strides in the file; the header has committed length and generation."""
    created = await client.create(PROMPT)
    (cache,) = client.service.store
    answer = await map_cache(client, created.read_grant)
    assert answer.dtype == kv_pb2.KV_DTYPE_FLOAT32
    assert answer.committed_length == len(PROMPT)
    assert answer.generation == created.generation
    assert 0 < answer.lease_ms <= created.lease_ms
    file, kv = content(answer.file.name), answer.kv
    assert answer.file.byte_size == len(file)
    assert [each.layer for each in kv.layers] == [0, 1]
    for each in kv.layers:
        for start, theirs in zip(
            (each.key_offset, each.value_offset),
            cache.sequence.segment.layer(each.layer),
            strict=True,
        ):
            assert (kv.heads, kv.capacity, kv.head_dim) == theirs.shape
            for head in range(kv.heads):
                for position in range(len(PROMPT)):
                    at = start + head * kv.head_stride + position * kv.position_stride
                    row = struct.unpack_from(f"{kv.head_dim}f", file, at)
                    assert torch.equal(torch.tensor(row), theirs[head, position])
    answer = await map_cache(client, created.read_grant, 1, 1, 1)
    assert [each.layer for each in answer.kv.layers] == [1]
    assert file[:8] == struct.pack("=Q", int.from_bytes(b"PACEKV\0\1", "big"))
    assert struct.unpack_from("=2Q", file, 8) == (created.generation, len(PROMPT))
    await client.release(created.handle)


async def test_refusals(client: Client) -> None:
    created, other = await client.create(PROMPT), await client.create(PROMPT)
    assert (await map_cache(client, other.read_grant)).generation == other.generation
    await client.release(other.handle)
    for grant, layers, expected in (
        (created.handle, (), (CODE.NOT_FOUND, "CACHE_NOT_FOUND")),
        (other.read_grant, (), (CODE.NOT_FOUND, "CACHE_NOT_FOUND")),
        (bytes(16), (), (CODE.NOT_FOUND, "CACHE_NOT_FOUND")),
        (b"", (), (CODE.INVALID_ARGUMENT, "BAD_GRANT")),
        (created.read_grant + b"x", (), (CODE.INVALID_ARGUMENT, "BAD_GRANT")),
        (created.read_grant, (2,), (CODE.INVALID_ARGUMENT, "LAYER_OUT_OF_RANGE")),
        (created.read_grant, (0, 2**32 - 1), (CODE.INVALID_ARGUMENT, "LAYER_OUT_OF_RANGE")),
    ):
        request = kv_pb2.MapCacheRequest(read_grant=grant, layers=layers)
        error = await failure(exchange(client).MapCache(request))
        assert (error.code(), reason_of(error)) == expected
    await client.release(created.handle)


async def test_the_grant_does_nothing_else(client: Client) -> None:
    """It neither releases nor renews; its holder need not have created the cache."""
    created = await client.create(PROMPT)
    assert not await client.release(created.read_grant)
    renew = verifier_pb2.RenewLeaseRequest(handle=created.read_grant)
    assert reason_of(await failure(client.stub.RenewLease(renew))) == "CACHE_NOT_FOUND"
    request = kv_pb2.MapCacheRequest(read_grant=created.read_grant)
    metadata = (("authorization", "Bearer somebody-else"),)
    answer = await exchange(client).MapCache(request, metadata=metadata)
    assert answer.generation == created.generation
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
    cache = await store.admit(Generation((1,), length_limit=9), "me")
    clock.now = 6.0
    assert store.find_granted(cache.read_grant) is cache
    assert store.lease_left(cache) == 4.0
    clock.now = 10.0
    with pytest.raises(CacheNotFound):
        store.find_granted(cache.read_grant)
    assert store.lease_left(cache) == 0.0
    assert await store.sweep() == 1
    store.check_integrity()


async def test_callers_on_other_machines_are_refused() -> None:
    store = new_store(Clock())
    cache = await store.admit(Generation((1,), length_limit=9), "me")
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
    assert len(answer.kv.layers) == LAYOUT.layers
    await store.release(cache)
