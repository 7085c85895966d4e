"""Random requests to every RPC of both services over real sockets, while a client generates.

`make fuzz` runs it for minutes. PACELINE_FUZZ_SECONDS is the duration; without it the test is
skipped. PACELINE_FUZZ_SEED is the seed.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from mutations import Fuzzer
from system_support import make_prompts
from tiny_models import write_model, write_tokenizer

from paceline.bench.services import kv_segments
from paceline.client import Client
from paceline.client._errors import from_rpc_error
from paceline.harness import local_services
from paceline.v1 import (
    drafter_pb2,
    exchange_pb2,
    exchange_pb2_grpc,
    kv_pb2,
    sampling_pb2,
    tree_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)

SECONDS = float(os.environ.get("PACELINE_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))
AT_A_TIME = 4
CALL_SECONDS = 60.0
OPEN_SECONDS = 2.0  # longest Generate call. It stays open without credits
SERVICES = {
    "verifier": ("VerifierService", "KvExchangeService", "DraftExchangeService"),
    "drafter": ("DrafterRegistryService",),
}
METHODS: dict[str, list[MethodDescriptor]] = {
    kind: [
        method
        for file in (verifier_pb2, kv_pb2, exchange_pb2, drafter_pb2)
        for name, service in file.DESCRIPTOR.services_by_name.items()
        if name in names
        for method in service.methods
    ]
    for kind, names in SERVICES.items()
}


def joining() -> exchange_pb2.JoinRequest:
    info = drafter_pb2.DrafterInfo(name="fuzz", version="1", traffic_share=1.0)
    listed = exchange_pb2.DrafterList(drafters=[info], default_drafter="fuzz")
    return exchange_pb2.JoinRequest(drafters=listed)


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, raws: list[bytes]) -> str:
    """Send raw messages to a method and read until it ends. Returns its status and reason."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    seconds = OPEN_SECONDS if method.name == "Generate" else CALL_SECONDS
    if method.client_streaming:
        stream: Any = channel.stream_stream(path)(iter(raws), timeout=seconds)
    else:
        stream = channel.unary_stream(path)(raws[0], timeout=seconds)
    return await status(stream)


async def over_socket(channel: grpc.aio.Channel, raws: list[bytes]) -> str:
    """Join, and send raw messages over the Unix socket. Returns the status of the call."""
    stub: Any = exchange_pb2_grpc.DraftExchangeServiceStub(channel)
    stream = stub.Join(timeout=CALL_SECONDS)
    await stream.write(joining())
    joined = (await stream.read()).joined
    _, writer = await asyncio.open_unix_connection(joined.socket_path.replace("@", "\0", 1))
    for raw in (joined.socket_token, *raws):
        writer.write(len(raw).to_bytes(4, "little") + raw)
    writer.close()
    return await status(stream)


async def status(stream: Any) -> str:
    """Status and reason that a call ends with."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {from_rpc_error(error).reason}"
    return "OK"


pytestmark = pytest.mark.skipif(not SECONDS, reason="make fuzz runs it")


async def test_random_requests_do_no_harm(tmp_path: Path) -> None:
    for folder in ("target", "small"):
        write_model("llama" if folder == "target" else "small", tmp_path / folder)
        write_tokenizer(tmp_path / folder)
    target, prompt = str(tmp_path / "target"), make_prompts(1)[0]
    arguments = ["--target", target, "--weights", "float32", "--kv-bytes", "64MiB"]
    arguments += ["--no-prefix-caching", "--lease-seconds", "3"]
    drafting = ["--load=ngram", f"--load=lm=lm:{tmp_path}/small", "--max-context=4096"]
    with local_services(arguments, drafting) as (verifier, drafter):
        ends: Counter[str] = Counter()
        processes = {"verifier": verifier, "drafter": drafter}
        async with (
            Client(verifier.address) as client,
            grpc.aio.insecure_channel(verifier.address) as near,
            grpc.aio.insecure_channel(drafter.address) as far,
        ):
            expected = (await client.generate(prompt, max_new_tokens=32)).token_ids
            channels = {"verifier": near, "drafter": far}
            until = monotonic() + SECONDS

            async def fuzz(number: int) -> None:
                fuzzer = Fuzzer(SEED * 1000 + number)
                while monotonic() < until:
                    fuzzer.capabilities = await capabilities(near, prompt)
                    for _ in range(25):
                        kind = fuzzer.draws.choice(list(METHODS))
                        method = fuzzer.draws.choice(METHODS[kind])
                        raws = requests(fuzzer, method, prompt)
                        name = method.name
                        if name == "Join" and fuzzer.draws.random() < 0.5:
                            name = "Join, socket"
                            end = await over_socket(near, raws)
                        else:
                            end = await call(channels[kind], method, raws)
                        ends[f"{name}: {end}"] += 1
                        process = processes[kind]
                        call_made = (name, end, [raw.hex() for raw in raws])
                        assert process.returncode is None, (call_made, process.log_tail())
                        # An unexpected exception and a stream that never ends are bugs. INTERNAL
                        # without a reason comes from gRPC, when it writes to a stream that ended.
                        code, _, reason = end.partition(" ")
                        assert code != "UNKNOWN", call_made
                        assert code != "INTERNAL" or not reason, (call_made, process.log_tail())
                        assert code != "DEADLINE_EXCEEDED" or name == "Generate", call_made

            async def generate() -> None:
                async with Client(verifier.address) as other:
                    while monotonic() < until:
                        result = await other.generate(prompt, max_new_tokens=32)
                        assert result.token_ids == expected

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(generate())
                for number in range(AT_A_TIME):
                    tasks.create_task(fuzz(number))
        print(f"{ends.total()} calls:", *sorted(ends.items()), sep="\n")
        assert any(end.endswith(": OK") for end in ends), "no call succeeded, so nothing was tested"
        async with asyncio.timeout(60):  # until the leases expire
            while kv_segments(verifier.pid, drafter.pid):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert verifier.terminate() == 0, verifier.log_tail()
        assert drafter.terminate() == 0, drafter.log_tail()


def requests(fuzzer: Fuzzer, method: MethodDescriptor, prompt: list[int]) -> list[bytes]:
    """Raw messages for a call: a valid call with one fault, or random messages."""
    if fuzzer.draws.random() < 0.6 and (valid := valid_call(fuzzer, method.name, prompt)):
        return fuzzer.altered(valid)
    return [fuzzer.raw(method.input_type) for _ in range(fuzzer.draws.randint(1, 4))]


def valid_call(fuzzer: Fuzzer, name: str, prompt: list[int]) -> list[Message]:
    """The messages of a valid call; empty for methods without parameters."""
    handle, grant = fuzzer.capabilities or (b"", b"")
    sampling = sampling_pb2.SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, logit_bias={3: 1.0}, seed=7
    )
    tree = tree_pb2.TokenTree(tokens=[1, 2, 3], parents=[-1, 0, 0], confidences=[0.9, 0.5, 0.4])
    match name:
        case "CreateCache":
            creation = verifier_pb2.CreateCacheRequest(
                prompt_tokens=prompt, max_new_tokens=8, parent_handle=handle, sampling=sampling
            )
            return [creation]
        case "Generate":
            start = verifier_pb2.GenerateStart(
                handle=handle,
                position=1,
                drafter=fuzzer.draws.choice(("ngram", "lm", "fuzz", "none")),
                always_draft=True,
            )
            return [
                verifier_pb2.GenerateRequest(start=start, credits=2),
                verifier_pb2.GenerateRequest(credits=100),
            ]
        case "Join":
            answered = exchange_pb2.JoinRequest(
                opened=[exchange_pb2.SequenceOpened(sequence=1, drafter="fuzz", version="1")],
                trees=[exchange_pb2.DraftedTree(sequence=1, round=1, tree=tree)],
                refused=[exchange_pb2.SequenceRefused(sequence=1, reason="NO", message="no")],
            )
            return [joining(), exchange_pb2.JoinRequest(use_stream=True), answered, answered]
        case "LoadDrafter":
            options = {"max_nodes": "4"}
            return [drafter_pb2.LoadDrafterRequest(name="x", method="ngram", options=options)]
        case "ActivateDrafter":
            return [drafter_pb2.ActivateDrafterRequest(name="x", version="2", traffic_share=0.3)]
        case "RollbackDrafter":
            return [drafter_pb2.RollbackDrafterRequest(name="x")]
        case "UnloadDrafter":
            return [drafter_pb2.UnloadDrafterRequest(name="x", version="1")]
        case "FollowCache":
            subscribe = kv_pb2.FollowSubscribe(read_grant=grant, layers=[0], budget=64)
            return [
                kv_pb2.FollowCacheRequest(subscribe=subscribe),
                kv_pb2.FollowCacheRequest(ack=kv_pb2.FollowAck(update_id=1, budget=32)),
            ]
    return []


async def capabilities(channel: grpc.aio.Channel, prompt: list[int]) -> list[bytes]:
    """Handle and read grant of a new cache; empty if the verifier refuses one."""
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
    request = verifier_pb2.CreateCacheRequest(prompt_tokens=prompt, max_new_tokens=8)
    try:
        messages = [message async for message in stub.CreateCache(request)]
    except grpc.aio.AioRpcError:
        return []
    return [messages[-1].created.handle, messages[-1].created.read_grant]
