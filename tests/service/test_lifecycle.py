"""Start, health, reflection, drain, stop and connections, in this process and in real ones."""

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from calls import failure, refusal, until
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.service import Gate, OptionsError, ServerOptions, ServiceError, limits, run_server

from .conftest import Serve, ToyProcess
from .toy import Toy, ask, call, echo, open_stream

Start = Callable[..., ToyProcess]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(response.status)


def watched(channel: grpc.aio.Channel) -> Any:
    """A call that hears of changes of the toy's health."""
    request = health_pb2.HealthCheckRequest(service="toy.Toy")
    return health_pb2_grpc.HealthStub(channel).Watch(request)


async def test_health_has_each_service_and_no_other(serve: Serve) -> None:
    served = await serve()
    async with served.channel() as channel:
        for name in ("", "toy.Toy", "paceline.v1.KvExchangeService"):
            assert await health(channel, name) == SERVING
        error = await failure(health(channel, "other.Service"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_services_and_describes_their_messages(serve: Serve) -> None:
    served = await serve()
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="paceline.v1.KvExchangeService"
        ),
    ]
    async with served.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = [r async for r in stub.ServerReflectionInfo(iter(requests))]
    assert {service.name for service in listed.list_services_response.service} == {
        "toy.Toy",
        "paceline.v1.KvExchangeService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert b"FollowCacheRequest" in described.file_descriptor_response.file_descriptor_proto[0]


async def test_sigterm_lets_a_stream_finish_and_refuses_new_ones(toy_process: Start) -> None:
    process = toy_process()
    async with grpc.aio.insecure_channel(await process.address()) as channel:
        stream = await open_stream(channel)
        process.process.send_signal(signal.SIGTERM)
        await process.noted("drain")
        assert await health(channel) == NOT_SERVING
        # It says nothing: a write that meets the refusal ends in INTERNAL inside grpc.
        refused = await refusal(call(channel, "StreamStream")())
        assert refused == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        # Calls that are no new generation still pass: a lease has to be renewed meanwhile.
        assert await ask(channel, "UnaryUnary", "renew") == "renew"
        for text in ("two", "three"):
            await echo(stream, text)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert await process.ended() == 0
    assert process.events()[-2:] == ["drained", "stop"]


async def test_a_closed_gate_lets_nothing_in_and_waits_for_those_inside() -> None:
    gate = Gate()
    with gate.enter():
        with suppress(RuntimeError), gate.enter():
            raise RuntimeError
        gate.close()
        waiting = asyncio.create_task(gate.drained())
        with pytest.raises(ServiceError, match="shutting down"), gate.enter():
            pytest.fail("it let us in")
        assert (gate.inside, waiting.done()) == (1, False)
    async with asyncio.timeout(60):
        await waiting


async def test_a_health_watcher_hears_of_the_drain_and_does_not_hold_it_up(serve: Serve) -> None:
    served = await serve()
    async with served.channel() as channel:
        watch = watched(channel)
        assert (await watch.read()).status == SERVING
        served.stop.set()
        assert (await watch.read()).status == NOT_SERVING
        await served.running
    assert served.toy.events == ["start", "drain", "drained", "stop"]


async def test_calls_over_the_stream_limit_wait_their_turn(serve: Serve) -> None:
    served = await serve(max_concurrent_streams=1)
    async with served.channel() as channel:
        first = await open_stream(channel)
        second = call(channel, "StreamStream")()
        writing = asyncio.create_task(second.write(StringValue(value="two")))
        await echo(first, "again")
        assert served.toy.gate.inside == 1
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        await writing
        assert (await second.read()).value == "two"
        second.cancel()


async def test_a_drain_ends_after_its_time(toy_process: Start) -> None:
    process = toy_process(drain=0.2)
    async with grpc.aio.insecure_channel(await process.address()) as channel:
        stream = await open_stream(channel)
        process.process.send_signal(signal.SIGINT)
        assert await process.ended() == 0
        assert (await failure(stream)).code() is grpc.StatusCode.UNAVAILABLE
    # What the handler did on its cancellation came before the service freed everything.
    assert process.events() == ["start", "drain", "stream ended", "stop"]


async def test_a_second_signal_ends_at_once_and_cleans_up(toy_process: Start) -> None:
    process = toy_process(drain=3600)
    async with grpc.aio.insecure_channel(await process.address()) as channel:
        _stream = await open_stream(channel)
        process.process.send_signal(signal.SIGTERM)
        await process.noted("drain")
        process.process.send_signal(signal.SIGTERM)
        assert await process.ended() == 128 + signal.SIGTERM
    assert process.events() == ["start", "drain", "stream ended", "stop"]


async def test_a_signal_during_start_ends_before_listening(toy_process: Start) -> None:
    process = toy_process(hangs=True)
    await process.noted("start")
    process.process.send_signal(signal.SIGTERM)
    assert await process.ended() == 0
    assert process.events() == ["start", "stop"]


async def test_a_failing_start_still_stops() -> None:
    toy = Toy()
    toy.fail_to_start = True
    with pytest.raises(ServiceError, match="the model is not there"):
        await run_server(toy, ServerOptions("127.0.0.1:0"), stop_event=asyncio.Event())
    assert toy.events == ["start", "stop"]


async def test_a_fault_ends_the_server_without_a_drain() -> None:
    toy, ready = Toy(), asyncio.get_running_loop().create_future()
    options = ServerOptions("127.0.0.1:0")
    running = asyncio.create_task(
        run_server(toy, options, on_ready=ready.set_result, stop_event=asyncio.Event())
    )
    async with grpc.aio.insecure_channel(await ready) as channel:
        watch = watched(channel)
        assert (await watch.read()).status == SERVING
        toy.broken.set()
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(RuntimeError, match="the device is gone"):
            await running
    assert toy.events == ["start", "stop"]


async def test_a_taken_port_is_a_clear_error(serve: Serve) -> None:
    served = await serve()
    toy = Toy()
    with pytest.raises(OptionsError, match="cannot listen on"):
        await run_server(toy, ServerOptions(served.address), stop_event=asyncio.Event())
    assert toy.events == ["start", "stop"]
    async with served.channel() as channel:
        assert await ask(channel, "UnaryUnary", "still there") == "still there"


async def test_a_unix_socket_is_its_users_alone_and_replaces_a_dead_one(
    serve: Serve, short_folder: Path
) -> None:
    path = short_folder / "toy.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    served = await serve(f"unix:{path}")
    assert served.address == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    async with served.channel() as channel:
        assert await ask(channel, "UnaryStream", "hello") == "hello"


async def test_connections_that_say_nothing_are_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each after the time for a handshake, and those beyond the limit at once; callers notice
    nothing."""
    monkeypatch.setattr(limits, "TRANSPORT_SECONDS", 1)
    monkeypatch.setattr(limits, "CONNECTIONS", 8)
    served = await serve("127.0.0.1:0")
    host, _, port = served.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    for reader, writer in silent:
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
    async with served.channel() as channel:
        assert await ask(channel, "UnaryUnary", "one") == "one"


def connected(address: str) -> int:
    """Connections that a server in this process has."""
    port = int(address.rpartition(":")[2])
    of_process = psutil.Process().net_connections("tcp")
    return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in of_process)


async def test_idle_connections_make_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 8)
    monkeypatch.setattr(limits, "CONNECTIONS_SECONDS", 0.05)
    served = await serve("127.0.0.1:0")
    async with AsyncExitStack() as opened:

        async def caller() -> grpc.aio.Channel:
            apart = {"grpc.use_local_subchannel_pool": 1}
            return await opened.enter_async_context(served.channel(**apart))

        running = await open_stream(await caller())
        idle = [await caller() for _ in range(30)]
        for channel in idle:
            assert await ask(channel, "UnaryUnary", "hello") == "hello"
        await until(lambda: connected(served.address) <= 8)
        assert await ask(await caller(), "UnaryUnary", "new") == "new"
        await echo(running, "still there")
        assert await ask(idle[0], "UnaryUnary", "again") == "again", "it connects again"
