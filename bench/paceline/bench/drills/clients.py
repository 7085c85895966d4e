"""A thousand clients that disappear, and clients with handles that are not theirs."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Any

import grpc

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.load import Text
from paceline.bench.drills.world import Services, World, create_cache, creation, growth
from paceline.client import NotFoundError
from paceline.client._errors import from_rpc_error
from paceline.v1 import (
    exchange_pb2,
    exchange_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

_CONCURRENCY = 16
_GROWTH_BYTES = 64 << 20
_OTHER_OWNER = (("authorization", "Bearer someone-else"),)


async def abandoned(world: World) -> Outcome:
    """Clients disappear in and after the prefill and in rounds, and drafter services do."""
    outcome = Outcome()
    async with world.services() as services:
        async with services.load(concurrency=4) as load:
            await _abandon(services, world, _CONCURRENCY)
            early = services.memory()
            await _abandon(services, world, world.scale.clients)
            growth(early, services.memory(), _GROWTH_BYTES, outcome)
            await load.more(4)
        load.report(outcome)
        await services.end(outcome)
    outcome.figures["clients"] = world.scale.clients
    return outcome


async def _abandon(services: Services, world: World, clients: int) -> None:
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(index: int) -> None:
        async with slots:
            with suppress(grpc.aio.AioRpcError):  # a full verifier refuses some
                await _STAGES[index % len(_STAGES)](services, world.texts[index % len(world.texts)])

    await asyncio.gather(*(one(index) for index in range(clients)))


async def _in_prefill(services: Services, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(creation(text))
        await call.wait_for_connection()


async def _after_prefill(services: Services, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        await create_cache(channel, text)


async def _in_a_round(services: Services, text: Text, drafter: str = "none") -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        created = await create_cache(channel, text)
        stream = verifier_pb2_grpc.VerifierServiceStub(channel).Generate()
        start = verifier_pb2.GenerateStart(
            handle=created.handle, position=1, drafter=drafter, always_draft=drafter != "none"
        )
        credits = len(text.expected)
        await stream.write(verifier_pb2.GenerateRequest(start=start, credits=credits))
        await stream.read()


async def _while_drafting(services: Services, text: Text) -> None:
    await _in_a_round(services, text, "ngram")


async def _while_joining(services: Services, text: Text) -> None:
    """A drafter service disappears, before and after it has joined."""
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        stream = exchange_pb2_grpc.DraftExchangeServiceStub(channel).Join()
        drafters = exchange_pb2.DrafterList()
        await stream.write(exchange_pb2.JoinRequest(drafters=drafters))
        if len(text.prompt) % 2:
            await stream.read()
            await stream.write(exchange_pb2.JoinRequest(use_stream=True))


_STAGES = (_in_prefill, _after_prefill, _in_a_round, _while_drafting, _while_joining)


async def forged_handles(world: World) -> Outcome:
    """Every handle that its user may not hold must be answered like one that never existed."""
    outcome = Outcome()
    verifier = world.verifier_process("--lease-seconds=1")
    async with world.services(verifier=verifier) as services:
        async with services.load() as load:
            async with grpc.aio.insecure_channel(services.verifier.address) as channel:
                exchange = kv_pb2_grpc.KvExchangeServiceStub(channel)

                async def no_grant(grant: bytes) -> bool:
                    return await _not_found(
                        exchange.MapCache(kv_pb2.MapCacheRequest(read_grant=grant))
                    )

                created = await create_cache(channel, world.texts[0])
                forged = [await _unknown(channel, secrets.token_bytes(16)) for _ in range(50)]
                other = await _unknown(channel, created.handle, metadata=_OTHER_OWNER)
                outcome.checks |= {
                    "forged handles are unknown": all(forged),
                    "another owner's handle is unknown": other,
                    "a read grant is no handle": await _unknown(channel, created.read_grant),
                    "a handle is no read grant": await no_grant(created.handle),
                }
                await asyncio.sleep(2.5)  # until the lease expires and the next sweep
                outcome.checks |= {
                    "an expired handle is unknown": await _unknown(channel, created.handle),
                    "an expired grant is unknown": await no_grant(created.read_grant),
                }
        load.report(outcome)
        await services.end(outcome)
    return outcome


async def _unknown(channel: grpc.aio.Channel, handle: bytes, **options: Any) -> bool:
    """Whether no call accepts the handle, and releasing it releases nothing."""
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    stream = stub.Generate(**options)
    start = verifier_pb2.GenerateStart(handle=handle, position=1)
    await stream.write(verifier_pb2.GenerateRequest(start=start, credits=1))
    fork = verifier_pb2.CreateCacheRequest(prompt_tokens=[1], parent_handle=handle)
    renew = verifier_pb2.RenewLeaseRequest(handle=handle)
    release = verifier_pb2.ReleaseCacheRequest(handle=handle)
    return (
        await _not_found(stream.read())
        and await _not_found(stub.CreateCache(fork, **options).read())
        and await _not_found(stub.RenewLease(renew, **options))
        and not (await stub.ReleaseCache(release, **options)).released
    )


async def _not_found(call: Any) -> bool:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error)
        return isinstance(failure, NotFoundError) and failure.reason == "CACHE_NOT_FOUND"
    return False


DRILLS = [
    Drill("abandoned clients", "clients disappear at every stage", abandoned),
    Drill("forged handles", "forged, expired, another owner's, of another kind", forged_handles),
]
