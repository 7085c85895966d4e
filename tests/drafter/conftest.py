"""A drafter service on a unix socket, in this process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline.bench.plugins import write_distribution
from paceline.drafter import DrafterSpec, build_service
from paceline.service import ServerOptions, run_server
from paceline.v1 import drafter_pb2, drafter_pb2_grpc

from . import adversaries, fakes

VOCAB = 1000


@pytest.fixture(autouse=True, scope="session")
def registered_methods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Registers the methods of the tests in this process."""
    methods = {**fakes.METHODS, **adversaries.METHODS}
    folder = write_distribution(tmp_path_factory.mktemp("methods"), methods)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


class Drafting:
    """Client side of one service in a test."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        stop: asyncio.Event | None = None,
        service: Any = None,
    ) -> None:
        self.address = address
        self.service = service
        """The service object."""
        self.stop = stop or asyncio.Event()
        """Set it to drain and stop the service."""
        self.channel = channel
        self.drafter = drafter_pb2_grpc.DrafterServiceStub(channel)
        self.registry = drafter_pb2_grpc.DrafterRegistryServiceStub(channel)

    async def attach(self, tokens: Sequence[int], token: str = "", **fields: Any) -> Stream:
        """Attach, with a bearer token if one is given, and wait for the response."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        stream = Stream(self.drafter.Draft(metadata=metadata), len(tokens))
        fields = {"vocab_size": VOCAB, "prompt_length": len(tokens), **fields}
        attach = drafter_pb2.DraftAttach(tokens=tokens, **fields)
        await stream.send(drafter_pb2.DraftRequest(attach=attach))
        stream.attached = (await stream.read()).attached
        return stream


class Stream:
    """One attached generation."""

    attached: drafter_pb2.DraftAttached

    def __init__(self, call: Any, length: int) -> None:
        self.call = call
        self.length = length
        self.rounds = 0

    async def send(self, request: drafter_pb2.DraftRequest) -> None:
        """Send a message. If the stream has ended, :meth:`read` raises its status."""
        try:
            await self.call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def read(self) -> drafter_pb2.DraftResponse:
        """The next response."""
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF, "the stream ended without a status"
        return answer

    async def round(self, tokens: Sequence[int] = (), **fields: Any) -> drafter_pb2.DraftTree:
        """One round."""
        self.length += len(tokens)
        self.rounds += 1
        fields = {
            "node_budget": 16,
            "total_length": self.length,
            "round_id": self.rounds,
            "new_tokens": tokens,
            **fields,
        }
        await self.send(drafter_pb2.DraftRequest(round=drafter_pb2.DraftRound(**fields)))
        return (await self.read()).tree

    async def end(self) -> None:
        """End the stream without an error."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


@asynccontextmanager
async def drafting(
    *specs: str, drain_seconds: float = 0.1, **options: Any
) -> AsyncIterator[Drafting]:
    """Serve drafters on a unix socket; streams that are open at the end are cancelled."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/drafter"
        service = build_service([DrafterSpec.parse(spec) for spec in specs], **options)
        stop, ready = asyncio.Event(), asyncio.Event()
        server = asyncio.create_task(
            run_server(
                service,
                ServerOptions(address=address, drain_seconds=drain_seconds),
                on_ready=lambda _: ready.set(),
                stop_event=stop,
            )
        )
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({server, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if server.done():
            await server
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Drafting(address, channel, stop, service)
        finally:
            stop.set()
            await server


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that has no event."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def failure(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    """Status code and reason of a failed call."""
    status = rpc_status.from_call(error.value)
    assert status is not None, "no rich status"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "paceline"
    return error.value.code(), info.reason


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """A slow verifier is no failure here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.drafter.kv.exchange.CALL_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model for `lm`."""
    from .models import write_model  # slow to import, and most tests do not need it

    return write_model(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture
async def ngram() -> AsyncIterator[Drafting]:
    """A service with one ngram drafter."""
    async with drafting("ngram=ngram") as service:
        yield service
