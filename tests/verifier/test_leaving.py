"""Clients that leave at any time: what they had is freed, and nobody computes for them."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from calls import failure, reason_of, until
from verifier_support import Client, serving

from paceline.service import limits
from paceline.v1 import exchange_pb2_grpc, kv_pb2, kv_pb2_grpc, verifier_pb2, verifier_pb2_grpc

PROMPT = list(range(1, 40))


async def test_a_cache_has_a_short_lease_until_it_is_used(model: Path, tmp_path: Path) -> None:
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        created = await client.create(PROMPT)
        assert created.lease_ms == limits.UNUSED_SECONDS * 1000
        stub = verifier_pb2_grpc.VerifierServiceStub(client.channel)
        renewed = await stub.RenewLease(verifier_pb2.RenewLeaseRequest(handle=created.handle))
        assert renewed.lease_ms == 30_000
        await client.release(created.handle)


async def test_cancels_while_a_cache_is_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment, also when the verifier has answered and does not hear of it."""
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 0.2)
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        await left_alone(client, random.Random(0), 40)
        store = client.service.store
        await until(lambda: not len(store))
        store.check_integrity()


async def left_alone(client: Client, draws: random.Random, count: int) -> None:
    stub = verifier_pb2_grpc.VerifierServiceStub(client.channel)
    for _ in range(count):
        call = stub.CreateCache(verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT))
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(draws.uniform(0, 0.02))
        call.cancel()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_drain_ends_texts_that_nobody_reads(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their leases, which are long."""
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 1e6)
    monkeypatch.setattr(limits, "ABANDONED_SECONDS", 0.1)
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28, lease_seconds=1e6) as client:
        await client.create(PROMPT, ignore_eos=True)
        await asyncio.wait_for(client.service.drain(), 60)
        assert not client.service.store.unfinished


@pytest.mark.parametrize("stream", ["Generate", "FollowCache", "Join"])
async def test_a_stream_that_says_nothing_ends(
    stream: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_MESSAGE_SECONDS", 0.1)
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        stubs = (
            client.stub,
            kv_pb2_grpc.KvExchangeServiceStub(client.channel),
            exchange_pb2_grpc.DraftExchangeServiceStub(client.channel),
        )
        (method,) = (getattr(each, stream) for each in stubs if hasattr(each, stream))
        error = await failure(method())
        assert (error.code().name, reason_of(error)) == ("FAILED_PRECONDITION", "NO_MESSAGE")


async def test_followers_and_creators_that_take_nothing_lose_their_streams(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their connection takes 64 KiB, and what they ask for is longer."""
    monkeypatch.setattr(limits, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 1e6)
    async with serving(model, tmp_path / "v.sock", kv_bytes=1 << 28) as client:
        request = verifier_pb2.CreateCacheRequest(
            prompt_tokens=[token % 60 for token in range(1500)], prompt_logprobs=20
        )
        created = await client.create(list(request.prompt_tokens))
        async with grpc.aio.insecure_channel(
            client.address, options=[("grpc.http2.bdp_probe", 0)]
        ) as channel:
            create = verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(request)
            follow = kv_pb2_grpc.KvExchangeServiceStub(channel).FollowCache()
            subscribe = kv_pb2.FollowSubscribe(read_grant=created.read_grant, budget=1500)
            await follow.write(kv_pb2.FollowCacheRequest(subscribe=subscribe))
            counts = client.service._follow_counts
            await until(lambda: counts.streams == 1 and len(client.service.store) == 2)
            await until(lambda: counts.streams == 0 and len(client.service.store) == 1)
            for call in (create, follow):
                assert reason_of(await failure(call)) == "NOT_READ"
            await client.release(created.handle)
