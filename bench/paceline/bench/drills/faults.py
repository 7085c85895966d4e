"""The faults: swaps, killed and stopped processes, jumps of the clock, full memory, bad clients."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import grpc

from paceline.bench.drills.load import Outcome, Text
from paceline.bench.drills.world import Drill, DrillServices, World, create_cache, creation, growth
from paceline.client import InvalidRequestError, NotFoundError
from paceline.client._errors import from_rpc_error
from paceline.harness import ServiceProcess
from paceline.v1 import (
    drafter_pb2,
    exchange_pb2,
    exchange_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

_SWAP_GROWTH_BYTES = 32 << 20  # less than the weights of two versions
RECOVERY_SECONDS = 30.0  # a generation begun after a process is back must have ended within
_STOPPED_SECONDS = 2.0
_HOUR, _DAY = 3600, 86_400
# Offsets of the wall clock, one after the other. Unit: seconds.
_JUMPS = (_HOUR, -_HOUR, _DAY, -_DAY, 365 * _DAY, -10 * 365 * _DAY, 0)
_CONCURRENCY = 16
_GROWTH_BYTES = 64 << 20
_OTHER_OWNER = (("authorization", "Bearer someone-else"),)


async def swap(world: World) -> Outcome:
    """Load a version, route all generations to it, unload the one before; again and again."""
    outcome = Outcome()
    swaps = world.scale.swaps
    seconds: list[float] = []
    early: list[int] = []
    async with world.services([f"x={world.lm}"]) as services:
        verifier = services.verifier.pid
        async with services.load() as load:
            # Buffers for the numbers of rows that occur are allocated once and stay.
            await load.more(4 * world.scale.generations)
            for number in range(swaps):
                begun = time.monotonic()
                await _swap(services, world, number)
                seconds.append(time.monotonic() - begun)
                await load.more(max(1, world.scale.generations // 4))
                if number == swaps // 5:
                    early = await _memory(services)
            growth(early, await _memory(services), _SWAP_GROWTH_BYTES, outcome)
        load.report(outcome)
        versions = [drafter.version for drafter in (await _listed(services)).drafters]
        outcome.checks["only the last version is left"] = versions == [str(swaps + 1)]
        outcome.checks["verifier not restarted"] = (
            services.verifier.pid == verifier and services.verifier.returncode is None
        )
        outcome.checks["most versions drafted"] = len(load.versions) > swaps // 2
        await services.end(outcome)
    outcome.figures |= {
        "swaps": swaps,
        "median seconds a swap": round(statistics.median(seconds), 3),
        "versions that drafted": len(load.versions),
    }
    return outcome


async def _swap(services: DrillServices, world: World, number: int) -> None:
    """Every third version is of a method without weights."""
    request = drafter_pb2.LoadDrafterRequest(name="x", method="ngram", activate=True)
    if number % 3 != 2:
        request.method, request.folder = "lm", str(world.target)
        request.options["widths"] = "1,1,1"
    loaded = await services.registry.LoadDrafter(request)
    before = str(int(loaded.drafter.version) - 1)
    await services.registry.UnloadDrafter(
        drafter_pb2.UnloadDrafterRequest(name="x", version=before)
    )


async def _memory(services: DrillServices) -> list[int]:
    """Lowest memory of both services over two seconds with one version loaded, without the
    temporary buffers of steps."""
    while len((await _listed(services)).drafters) > 1:  # noqa: ASYNC110 - the service moves streams
        await asyncio.sleep(0.05)
    lowest = services.memory()
    for _ in range(20):
        await asyncio.sleep(0.1)
        lowest = list(map(min, lowest, services.memory()))
    return lowest


async def _listed(services: DrillServices) -> drafter_pb2.ListDraftersResponse:
    request = drafter_pb2.ListDraftersRequest()
    response: drafter_pb2.ListDraftersResponse = await services.registry.ListDrafters(request)
    return response


def _kill(process: ServiceProcess) -> None:
    process.kill()
    process.start()


def _stop(process: ServiceProcess) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(_STOPPED_SECONDS)
    process.send_signal(signal.SIGCONT)


def _restart(process: ServiceProcess) -> None:
    process.terminate()
    process.start()


_HITS = {
    "killed": ("SIGKILL, and start again,", _kill),
    "stopped": ("SIGSTOP for two seconds", _stop),
    "restarted": ("drain and start again", _restart),
}


def _drill(
    kind: Literal["verifier", "drafter"],
    name: str,
    what: str,
    hit: Callable[[ServiceProcess], None],
) -> Drill:
    async def run(world: World) -> Outcome:
        outcome = Outcome()
        recoveries: list[float] = []
        async with world.services([world.lm]) as services:
            process = services.verifier if kind == "verifier" else services.drafter
            async with services.load() as load:
                for _ in range(world.scale.hits):
                    await asyncio.sleep(world.chance.uniform(0.0, 1.5))
                    await asyncio.to_thread(hit, process)
                    drafted = kind == "drafter"
                    recoveries.append(await load.recovered(RECOVERY_SECONDS, drafted=drafted))
            load.report(outcome)
            await services.end(outcome)
        slowest = max(recoveries)
        outcome.checks[f"recovered within {RECOVERY_SECONDS:g} s"] = slowest < RECOVERY_SECONDS
        outcome.figures |= {"hits": len(recoveries), "slowest recovery s": round(slowest, 2)}
        return outcome

    return Drill(f"{kind} {name}", f"{what} the {kind}", run)


async def clock_jumps(world: World) -> Outcome:
    """Leases, deadlines and back-offs must not depend on the wall clock."""
    if shutil.which("gcc") is None:
        return Outcome(skipped="there is no gcc to compile the clock with")
    outcome = Outcome()
    shift = world.work / "clock"
    _write(shift, 0)
    environment = {"LD_PRELOAD": str(_compile(world.work)), "PACELINE_DRILL_CLOCK": str(shift)}
    async with world.services([world.lm], environment=environment) as services:
        async with services.load() as load:
            for jump in _JUMPS:
                _write(shift, jump)
                await asyncio.sleep(0.5)
                await load.more(max(2, world.scale.generations // 3))
        load.report(outcome)
        outcome.checks["no text was prefilled again"] = load.fallbacks["verifier_restarted"] == 0
        await services.end(outcome)
    outcome.figures["jumps"] = len(_JUMPS)
    return outcome


def _compile(work: Path) -> Path:
    library = work / "clock_shim.so"
    source = Path(__file__).with_name("clock_shim.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def _write(file: Path, seconds: int) -> None:
    with file.open("r+b" if file.exists() else "wb") as out:  # in place: services map the file
        out.write(seconds.to_bytes(8, "little", signed=True))


async def out_of_kv(world: World) -> Outcome:
    """A KV budget for three generations, and many more at a time."""
    verifier = world.verifier_process("--kv-bytes=14MiB")
    async with world.services(verifier=verifier) as services:
        outcome = Outcome()
        async with services.load() as load:
            await load.more(2 * world.scale.generations)
        load.report(outcome)
        outcome.figures["refused"] = load.fallbacks["verifier_full"]
        # This prompt can never fit: the refusal must be immediate and final.
        try:
            await services.client.generate([1] * 4000, max_new_tokens=1)
            refused = False
        except InvalidRequestError as error:
            refused = error.reason == "PROMPT_TOO_LONG"
        outcome.checks["what never fits is refused"] = refused
        await services.end(outcome)
    return outcome


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


async def _abandon(services: DrillServices, world: World, clients: int) -> None:
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(index: int) -> None:
        async with slots:
            with suppress(grpc.aio.AioRpcError):  # a full verifier refuses some
                await _STAGES[index % len(_STAGES)](services, world.texts[index % len(world.texts)])

    await asyncio.gather(*(one(index) for index in range(clients)))


async def _in_prefill(services: DrillServices, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).CreateCache(creation(text))
        await call.wait_for_connection()


async def _after_prefill(services: DrillServices, text: Text) -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        await create_cache(channel, text)


async def _in_a_round(services: DrillServices, text: Text, drafter: str = "none") -> None:
    async with grpc.aio.insecure_channel(services.verifier.address) as channel:
        created = await create_cache(channel, text)
        stream = verifier_pb2_grpc.VerifierServiceStub(channel).Generate()
        start = verifier_pb2.GenerateStart(
            handle=created.handle, position=1, drafter=drafter, always_draft=drafter != "none"
        )
        credits = len(text.expected)
        await stream.write(verifier_pb2.GenerateRequest(start=start, credits=credits))
        await stream.read()


async def _while_drafting(services: DrillServices, text: Text) -> None:
    await _in_a_round(services, text, "ngram")


async def _while_joining(services: DrillServices, text: Text) -> None:
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
                    subscribe = kv_pb2.FollowSubscribe(read_grant=grant, budget=1)
                    requests = [kv_pb2.FollowCacheRequest(subscribe=subscribe)]
                    return await _not_found(exchange.FollowCache(iter(requests)).read())

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
    Drill("swap", "versions with and without weights replace each other while texts stream", swap),
    *(_drill("verifier", name, *hit) for name, hit in _HITS.items()),
    *(_drill("drafter", name, *hit) for name, hit in _HITS.items()),
    Drill("clock jumps", "the wall clock of both services jumps by up to ten years", clock_jumps),
    Drill("verifier out of KV", "a KV budget for three generations at a time", out_of_kv),
    Drill("abandoned clients", "clients disappear at every stage", abandoned),
    Drill("forged handles", "forged, expired, another owner's, of another kind", forged_handles),
]
