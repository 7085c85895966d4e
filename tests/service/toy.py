"""A service with one method of each kind, which obeys its requests."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import uvloop
from google.protobuf.wrappers_pb2 import StringValue

from paceline.service import Gate, ServerOptions, ServiceError, owner_of, run_server
from paceline.v1 import kv_pb2_grpc

NAME = "toy.Toy"
KINDS = {
    "UnaryUnary": "unary_unary", "UnaryStream": "unary_stream",
    "StreamUnary": "stream_unary", "StreamStream": "stream_stream",
}  # fmt: skip
"""Methods of the toy, one of each kind, and what grpc calls the kind."""
SECRET = "a detail that no caller may see"


class Toy:
    """Obeys and echoes.

    `fail` raises a ServiceError, `bug` an unexpected error, `unbuilt` a NotImplementedError,
    `owner` answers with the caller's, `big N` with N characters, `abort` aborts by itself;
    anything else comes back.
    """

    service_names = (NAME, "paceline.v1.KvExchangeService")
    message_bytes: Mapping[str, int] = MappingProxyType({})

    def __init__(self, diary: Path | None = None) -> None:
        self.gate = Gate()
        self.diary = diary
        self.events: list[str] = []
        self.start_ends = True
        self.fail_to_start = False
        self.broken = asyncio.Event()

    def facts(self) -> dict[str, object]:
        return {"model": "toy"}

    def register(self, server: grpc.aio.Server) -> None:
        coding = StringValue.FromString, StringValue.SerializeToString
        handlers = {
            kind: getattr(grpc, f"{name}_rpc_method_handler")(getattr(self, kind), *coding)
            for kind, name in KINDS.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
        # A generated base class: plain functions that raise NotImplementedError.
        kv_pb2_grpc.add_KvExchangeServiceServicer_to_server(
            kv_pb2_grpc.KvExchangeServiceServicer(), server
        )

    async def start(self) -> None:
        self.note("start")
        if self.fail_to_start:
            raise ServiceError.internal("NO_MODEL", "the model is not there")
        if not self.start_ends:
            await asyncio.Event().wait()

    async def fault(self) -> None:
        await self.broken.wait()
        raise RuntimeError("the device is gone")

    async def drain(self) -> None:
        self.note("drain")
        self.gate.close()
        await self.gate.drained()
        self.note("drained")

    async def stop(self) -> None:
        self.note("stop")

    async def UnaryUnary(self, request: StringValue, context: Any) -> StringValue:
        return await self.obey(request, context)

    async def UnaryStream(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield await self.obey(request, context)

    async def StreamUnary(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        response = StringValue()
        async for request in requests:
            response = await self.obey(request, context)
        return response

    async def StreamStream(
        self, requests: AsyncIterator[StringValue], context: Any
    ) -> AsyncIterator[StringValue]:
        with self.gate.enter():
            try:
                async for request in requests:
                    yield await self.obey(request, context)
            finally:
                self.note("stream ended")

    async def obey(self, request: StringValue, context: Any) -> StringValue:
        order, _, number = request.value.partition(" ")
        match order:
            case "fail":
                raise ServiceError.resource_exhausted("FULL", "no room", 1.5, limit="3")
            case "bug":
                raise KeyError(SECRET)
            case "unbuilt":
                raise NotImplementedError
            case "abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "by itself")
            case "owner":
                return StringValue(value=owner_of(context))
            case "big":
                return StringValue(value="x" * int(number))
        return request

    def note(self, event: str) -> None:
        self.events.append(event)
        if self.diary is not None:
            with self.diary.open("a") as diary:
                diary.write(f"{event}\n")


def call(channel: grpc.aio.Channel, kind: str, raw: bool = False) -> Any:
    """The stub of one method of the toy, for messages or for `raw` bytes."""
    coding = () if raw else (StringValue.SerializeToString, StringValue.FromString)
    return getattr(channel, KINDS[kind])(f"/{NAME}/{kind}", *coding)


async def ask(channel: grpc.aio.Channel, kind: str, order: Any, **options: Any) -> Any:
    """Send one order (text, or raw bytes) to a method of any kind; its first answer.

    A stream of None stays silent: grpc.aio replaces the status of a call that is refused while a
    message is on its way.
    """
    raw = isinstance(order, bytes)
    request = order if raw else StringValue(value=order)
    streams = kind.startswith("Stream")
    silent = streams and order is None
    requests = [] if silent else [iter([request]) if streams else request]
    running = call(channel, kind, raw)(*requests, **options)
    if kind.endswith("Unary"):
        answer = await running
    else:
        answer = await running.read()
        if answer is grpc.aio.EOF:
            raise AssertionError("the stream ended without an answer and without an error")
    return answer if raw else answer.value


async def echo(stream: Any, text: str) -> None:
    """Write a message to a stream and read it back."""
    await stream.write(StringValue(value=text))
    assert (await stream.read()).value == text


async def open_stream(channel: grpc.aio.Channel) -> Any:
    """A stream whose first message was answered."""
    stream = call(channel, "StreamStream")()
    await echo(stream, "one")
    return stream


def main() -> None:
    """Serve a toy from the command line: ADDRESS READY_FILE DIARY DRAIN_SECONDS [hangs]."""
    address, ready, diary, drain, *hangs = sys.argv[1:]
    toy = Toy(Path(diary))
    toy.start_ends = not hangs
    options = ServerOptions(address, drain_seconds=float(drain))

    def on_ready(bound: str) -> None:
        Path(ready).write_text(bound)

    uvloop.run(run_server(toy, options, on_ready=on_ready))


if __name__ == "__main__":
    main()
