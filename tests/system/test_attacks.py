"""Hostile peers of a verifier: beside each, a user's text goes on, drafted and with its tokens, and
memory returns."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from calls import eventually
from system_support import EAGER

from paceline.client import Client
from paceline.harness import ServiceProcess
from paceline.v1 import (
    drafter_pb2,
    exchange_pb2,
    exchange_pb2_grpc,
    sampling_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)

PROMPT = [5, 9, 13, 5, 9, 13, 5, 9]
TEXT: dict[str, Any] = {
    "max_new_tokens": 96, "ignore_eos": True, "temperature": 1.0, "seed": 7, "drafter": "ngram",
}  # fmt: skip
GROWTH = 1.2


def listed(count: int, name: str, **fields: Any) -> exchange_pb2.DrafterList:
    drafters = [
        drafter_pb2.DrafterInfo(name=f"{name}{n}", version="1", traffic_share=1.0, **fields)
        for n in range(count)
    ]
    return exchange_pb2.DrafterList(drafters=drafters)


async def joined_by_stream(channel: Any, drafters: exchange_pb2.DrafterList) -> Any:
    call = exchange_pb2_grpc.DraftExchangeServiceStub(channel).Join()
    await call.write(exchange_pb2.JoinRequest(drafters=drafters))
    await call.read()
    await call.write(exchange_pb2.JoinRequest(use_stream=True))
    await call.read()
    return call


async def lists(channel: Any, path: Path, rng: random.Random) -> None:
    """A service that announces 250 drafters again and again."""
    drafters = listed(250, "l", hidden_state_layers=[0, 1])
    call = await joined_by_stream(channel, drafters)
    for _ in range(100):
        await call.write(exchange_pb2.JoinRequest(drafters=drafters))
        await call.read()
    call.cancel()


async def services_with_long_lists(channel: Any, path: Path, rng: random.Random) -> None:
    """As many as there may be, each with what it may announce; clients still get an answer."""
    calls = []
    with suppress(grpc.aio.AioRpcError):
        while len(calls) < 256:
            calls.append(
                await joined_by_stream(channel, listed(250, f"s{len(calls)}_", folder="f" * 900))
            )
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    model = await stub.GetModel(verifier_pb2.GetModelRequest())
    assert model.ByteSize() < 4 << 20
    for call in calls:
        call.cancel()


async def unknown_fields(channel: Any, path: Path, rng: random.Random) -> None:
    """Lists that come with megabytes which nobody knows."""
    call = channel.stream_stream(
        "/paceline.v1.DraftExchangeService/Join",
        request_serializer=bytes,
        response_deserializer=exchange_pb2.JoinResponse.FromString,
    )
    message = exchange_pb2.JoinRequest(drafters=listed(1, "u")).SerializeToString()
    message += b"\xa2\x06\x80\x80\x80\x01" + b"z" * (1 << 21)
    calls = [call() for _ in range(24)]
    for each in calls:
        await each.write(message)
        await each.read()
        await each.write(exchange_pb2.JoinRequest(use_stream=True).SerializeToString())
        await each.read()
    for each in calls:
        each.cancel()


async def connections(channel: Any, path: Path, rng: random.Random) -> None:
    """Peers of the socket that say nothing, half a frame, nonsense, or close at once."""
    openings = (
        b"", b"\x10\0", b"\x10\0\0\0" + rng.randbytes(5), b"\xff" * 20, rng.randbytes(40),
        b"\x10\0\0\0" + rng.randbytes(16), b"\0\0\0\0", b"\0" * 20,
    )  # fmt: skip
    kept: list[socket.socket] = []
    for _ in range(600):
        each = socket.socket(socket.AF_UNIX)
        each.setblocking(False)
        try:
            each.connect(str(path))
            each.send(rng.choice(openings))
        except OSError:
            each.close()
            await asyncio.sleep(0.001)
        kept.append(each)
        if rng.random() < 0.5:
            each.close()
        if len(kept) > 100:
            kept.pop(0).close()
    for each in kept:
        each.close()


CONSTRAINTS: tuple[dict[str, str], ...] = (
    {"json_schema": '{"type": "integer", "multipleOf": 99999989}'},
    {"regex": "(a|b){2000}"},
    {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    {"json_schema": '{"properties":{"%s":' % ("k" * 2000) * 200 + "{}" + "}}" * 200},
    {},
    {},
)


async def cancelled(channel: Any, path: Path, rng: random.Random) -> None:
    """Requests that end at any moment, some with constraints that cost."""
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)

    async def one() -> None:
        sampling = sampling_pb2.SamplingParams(temperature=1.0, **rng.choice(CONSTRAINTS))
        request = verifier_pb2.CreateCacheRequest(
            prompt_tokens=[rng.randrange(40) for _ in range(rng.choice((3, 200)))],
            sampling=sampling,
        )
        create, generate = stub.CreateCache(request), stub.Generate()

        async def use() -> None:
            async for message in create:
                if message.HasField("created"):
                    start = verifier_pb2.GenerateStart(handle=message.created.handle, position=1)
                    await generate.write(verifier_pb2.GenerateRequest(start=start, credits=9))
                    while await generate.read() is not grpc.aio.EOF:
                        pass

        with suppress(TimeoutError, grpc.aio.AioRpcError):
            await asyncio.wait_for(use(), rng.choice((0.001, 0.01, 0.03, 0.1, 0.3)))
        create.cancel()
        generate.cancel()

    for _ in range(12):
        await asyncio.gather(*(one() for _ in range(8)))


Attack = Callable[[Any, Path, random.Random], Awaitable[None]]
ATTACKS: tuple[Attack, ...] = (
    lists, services_with_long_lists, unknown_fields, connections, cancelled,
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_a_text_goes_on(attack: Attack, demo: tuple[ServiceProcess, Path]) -> None:
    verifier, path = demo
    async with (
        Client(verifier.address, drafting=EAGER, cache_dir=None) as client,
        grpc.aio.insecure_channel(verifier.address) as channel,
    ):
        await client.generate(PROMPT, regex="[a-z]{1,4}", max_new_tokens=4)  # loads the library
        expected = (await client.generate(PROMPT, **TEXT)).token_ids
        before = own_memory(verifier.pid)
        attacking = asyncio.ensure_future(attack(channel, path, random.Random(0)))
        while True:
            last = attacking.done()  # one more text after the end
            result = await client.generate(PROMPT, **TEXT)
            assert result.token_ids == expected
            assert result.stats.drafted_rounds
            if last:
                break
        await attacking
    await asyncio.to_thread(
        eventually, lambda: own_memory(verifier.pid) <= GROWTH * before, "memory has returned"
    )
    assert verifier.returncode is None


def own_memory(pid: int) -> int:
    """Memory of a process that is no file's and not shared; KV is shared. Unit: KiB."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0])
