"""Texts that end in any way, and clients that leave at any time: what they used is freed."""

import asyncio
import gc
import json
import random
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest
from calls import failure, refusal, until
from test_grammar import PROMPT, fields, ids
from verifier_support import Client, Serve

from paceline.service import limits
from paceline.v1 import (
    exchange_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    sampling_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)
from paceline.verifier import grammar
from paceline.verifier.kv.base import open_segments

SERVED = {"target": "written", "prefix_caching": True}
MANY = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1000)}}
FAILS = json.dumps({"type": "array", "items": MANY, "minItems": 1})  # too complex after some tokens
LONG = list(range(1, 40))


async def test_a_cache_has_a_short_lease_until_it_is_used(serve: Serve) -> None:
    async with serve() as client:
        created = await client.create(LONG)
        assert created.lease_ms == limits.UNUSED_SECONDS * 1000
        renewal = verifier_pb2.RenewLeaseRequest(handle=created.handle)
        renewed = await client.stub.RenewLease(renewal)
        assert renewed.lease_ms == 30_000


async def test_cancels_while_a_cache_is_made(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment, also when the verifier has answered and does not hear of it."""
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 0.2)
    async with serve() as client:
        draws, store = random.Random(0), client.service.store
        for _ in range(40):
            call = client.stub.CreateCache(verifier_pb2.CreateCacheRequest(prompt_tokens=LONG))
            reading = asyncio.create_task(call.read())
            await asyncio.sleep(draws.uniform(0, 0.02))
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not len(store))
        store.check_integrity()


async def test_a_drain_ends_texts_that_nobody_reads(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their leases, which are long."""
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 1e6)
    monkeypatch.setattr(limits, "ABANDONED_SECONDS", 0.1)
    async with serve(lease_seconds=1e6) as client:
        await client.create(LONG, ignore_eos=True)
        await asyncio.wait_for(client.service.drain(), 60)
        assert not client.service.store.unfinished


@pytest.mark.parametrize("stream", ["Generate", "FollowCache", "Join"])
async def test_a_stream_that_says_nothing_ends(
    serve: Serve, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_MESSAGE_SECONDS", 0.1)
    async with serve() as client:
        stubs = (
            client.stub,
            kv_pb2_grpc.KvExchangeServiceStub(client.channel),
            exchange_pb2_grpc.DraftExchangeServiceStub(client.channel),
        )
        (method,) = (getattr(each, stream) for each in stubs if hasattr(each, stream))
        said_nothing = (grpc.StatusCode.FAILED_PRECONDITION, "NO_MESSAGE")
        assert await refusal(method()) == said_nothing


async def test_followers_and_creators_that_take_nothing_lose_their_streams(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their connection takes 64 KiB, and what they ask for is longer."""
    monkeypatch.setattr(limits, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 1e6)
    async with serve() as client:
        request = verifier_pb2.CreateCacheRequest(
            prompt_tokens=[token % 60 for token in range(1500)], prompt_logprobs=20
        )
        created = await client.create(list(request.prompt_tokens))
        store = client.service.store
        [cache] = store
        async with grpc.aio.insecure_channel(
            client.address, options=[("grpc.http2.bdp_probe", 0)]
        ) as channel:
            create = verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(request)
            follow = kv_pb2_grpc.KvExchangeServiceStub(channel).FollowCache()
            subscribe = kv_pb2.FollowSubscribe(read_grant=created.read_grant, budget=1500)
            await follow.write(kv_pb2.FollowCacheRequest(subscribe=subscribe))
            await until(lambda: len(cache.sequence.listeners) == 1 and len(store) == 2)
            await until(lambda: not cache.sequence.listeners and len(store) == 1)
            for call in (create, follow):
                assert (await refusal(call))[1] == "NOT_READ"
            await client.release(created.handle)


# Without the garbage collector


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor are small constraints kept for later texts."""
    monkeypatch.setattr(grammar, "_SMALL_BYTES", -1)
    monkeypatch.setattr(limits, "UNUSED_SECONDS", 0.1)
    if open_segments():  # of other tests
        gc.collect()
    gc.disable()
    yield
    gc.enable()


async def ends(client: Client) -> None:
    await client.generate(PROMPT * 20, None, **fields(temperature=1.0))


async def is_refused(client: Client) -> None:
    """When it is read, and when its first mask has no token."""
    for sampling in ({"json_schema": '{"type": "nonsense"}'}, {"regex": "☃"}):
        asked = sampling_pb2.SamplingParams(**sampling)
        await failure(client.create(PROMPT, sampling=asked))


async def does_not_match(client: Client) -> None:
    await failure(client.create(PROMPT, output_tokens=ids("]"), **fields()))


async def fails_in_a_step(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields(schema=FAILS, temperature=1.0))
    await failure(client.rest(created.handle))
    await client.release(created.handle)


async def is_left_while_it_is_made(client: Client) -> None:
    for _ in range(4):
        request = verifier_pb2.CreateCacheRequest(prompt_tokens=PROMPT * 300, **fields())
        call = client.stub.CreateCache(request)
        await until(lambda: len(client.service.store) == 1)
        call.cancel()
        await until(lambda: len(client.service.store) == 0)


async def is_left_in_the_middle(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields())
    await client.steps(created.handle, 2)
    await client.release(created.handle)


async def is_released_while_it_runs(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields(schema='{"type": "array"}'))
    call = await client.begin(created.handle, credits=1 << 20)
    await call.read()
    await client.release(created.handle)
    await failure(call)


async def is_drained(client: Client) -> None:
    created = await client.create(PROMPT * 20, **fields())
    draining = asyncio.create_task(client.service.drain())
    await client.rest(created.handle)
    await draining
    await client.release(created.handle)


ENDINGS = (
    *(ends, is_refused, does_not_match, fails_in_a_step, is_left_while_it_is_made),
    *(is_left_in_the_middle, is_released_while_it_runs, is_drained),
)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.usefixtures("no_collector")
async def test_a_text_that(ending: Callable[[Client], Awaitable[None]], client: Client) -> None:
    await ending(client)
    grammars = client.service._servicer._grammars
    await until(lambda: not grammars._live_bytes and not grammars._live)
    client.service.store.check_integrity()
