"""A thousand clients that go without a word."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc

from paceline.bench.drills.drill import Drill, Outcome
from paceline.bench.drills.load import Text
from paceline.bench.drills.world import (
    Services,
    World,
    anonymous_bytes,
    create_cache,
    creation,
)
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

_AT_A_TIME = 16
_GROWTH_BYTES = 64 << 20


async def abandoned(world: World) -> Outcome:
    """Clients vanish in the middle of prefill, after it, in a round, and while drafting."""
    outcome = Outcome()
    async with world.services() as services:
        async with services.load(slots=4) as load:
            await _abandon(services, world, _AT_A_TIME)
            early = anonymous_bytes(services.verifier.pid), anonymous_bytes(services.drafter.pid)
            await _abandon(services, world, world.scale.clients)
            late = anonymous_bytes(services.verifier.pid), anonymous_bytes(services.drafter.pid)
            await load.more(4)
        load.judge(outcome)
        growth = [after - before for before, after in zip(early, late, strict=True)]
        outcome.checks[f"memory grew by less than {_GROWTH_BYTES >> 20} MiB"] = (
            max(growth) < _GROWTH_BYTES
        )
        await services.end(outcome)
    outcome.figures |= {
        "clients": world.scale.clients,
        "verifier grew by MiB": round(growth[0] / 2**20, 1),
        "drafter grew by MiB": round(growth[1] / 2**20, 1),
    }
    return outcome


async def _abandon(services: Services, world: World, clients: int) -> None:
    slots = asyncio.Semaphore(_AT_A_TIME)

    async def one(index: int) -> None:
        async with slots:
            with suppress(grpc.aio.AioRpcError):  # a full verifier refuses some, as it should
                await _WAYS[index % len(_WAYS)](services, world.texts[index % len(world.texts)])

    await asyncio.gather(*(one(index) for index in range(clients)))


async def _in_prefill(services: Services, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(creation(text))
        await call.wait_for_connection()


async def _after_prefill(services: Services, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        await create_cache(channel, text)


async def _in_a_round(services: Services, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        created = await create_cache(channel, text)
        stream = verifier_pb2_grpc.VerifierServiceStub(channel).Verify()
        await stream.write(
            verifier_pb2.VerifyRequest(
                handle=created.handle, round_id=1, free_run_steps=len(text.expected)
            )
        )
        await stream.read()


async def _while_drafting(services: Services, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.drafter.address) as channel:
        stream = drafter_pb2_grpc.DrafterServiceStub(channel).Draft()
        attach = drafter_pb2.DraftAttach(
            tokens=text.prompt, prompt_length=len(text.prompt), vocab_size=1 << 20
        )
        await stream.write(drafter_pb2.DraftRequest(attach=attach))
        await stream.read()
        round_ = drafter_pb2.DraftRound(round_id=1, node_budget=8, total_length=len(text.prompt))
        await stream.write(drafter_pb2.DraftRequest(round=round_))


_WAYS = (_in_prefill, _after_prefill, _in_a_round, _while_drafting)


DRILLS = [
    Drill("abandoned clients", "clients go without a word, at every stage", abandoned),
]
