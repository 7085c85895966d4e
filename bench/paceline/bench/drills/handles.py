"""Handles that nobody should hold: forged, expired, someone else's, of another kind."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import grpc

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.world import World, create_cache
from paceline.client import NotFoundError
from paceline.client._errors import from_rpc_error
from paceline.v1 import kv_pb2, kv_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_OTHER = (("authorization", "Bearer someone-else"),)


async def forged(world: World) -> Outcome:
    """Try them all while texts stream; each must look like a handle that never was."""
    outcome = Outcome()
    verifier = world.verifier_process("--lease-seconds", "1")
    async with world.services(verifier=verifier) as services:
        async with services.load() as load:
            async with grpc.aio.insecure_channel(services.verifier.address) as channel:
                created = await create_cache(channel, world.texts[0])
                outcome.checks["forged handles are unknown"] = all(
                    [await _is_unknown(channel, secrets.token_bytes(16)) for _ in range(50)]
                )
                outcome.checks["another's handle is unknown"] = await _is_unknown(
                    channel, created.handle, metadata=_OTHER
                )
                outcome.checks["a read grant is no handle"] = await _is_unknown(
                    channel, created.read_grant
                )
                exchange = kv_pb2_grpc.KvExchangeServiceStub(channel)
                outcome.checks["a handle is no read grant"] = await _not_found(
                    exchange.MapCache(kv_pb2.MapCacheRequest(read_grant=created.handle))
                )
                await asyncio.sleep(2.5)  # a lease and the sweep after it
                outcome.checks["an expired handle is unknown"] = await _is_unknown(
                    channel, created.handle
                )
                outcome.checks["an expired grant is unknown"] = await _not_found(
                    exchange.MapCache(kv_pb2.MapCacheRequest(read_grant=created.read_grant))
                )
        load.judge(outcome)
        await services.end(outcome)
    return outcome


async def _is_unknown(channel: grpc.aio.Channel, handle: bytes, **options: Any) -> bool:
    """Whether no call takes the handle, and releasing it releases nothing."""
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    stream = stub.Verify(**options)
    await stream.write(verifier_pb2.VerifyRequest(handle=handle, round_id=1))
    fork = verifier_pb2.CreateCacheRequest(prompt_tokens=[1], parent_handle=handle)
    release = verifier_pb2.ReleaseCacheRequest(handle=handle)
    return (
        await _not_found(stream.read())
        and await _not_found(stub.CreateCache(fork, **options).read())
        and await _not_found(
            stub.RenewLease(verifier_pb2.RenewLeaseRequest(handle=handle), **options)
        )
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
    Drill("forged handles", "forged, expired, someone else's, and of another kind", forged),
]
