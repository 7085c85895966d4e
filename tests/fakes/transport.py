"""A transport without services, for tests of programs that use the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

from fakes.verifier import END, FakeVerifier, Reply
from paceline.client import NotFoundError
from paceline.v1 import verifier_pb2


class MockTransport(FakeVerifier):
    """Calls the fake verifier without gRPC; no drafter has joined it, so it runs plain steps.

        client = Client(transport=MockTransport("Hello there."))
        assert (await client.generate("Hi")).text == "Hello there."

    `requests` lists the requests, and `open_caches` counts the caches that were not released.
    """

    END = END
    address = ""

    def __init__(self, reply: Reply, context: int = 1 << 20) -> None:
        super().__init__(reply)
        self.name, self.max_context, self.merged = "mock", context, 64

    def __repr__(self) -> str:
        return f"<MockTransport, {len(self.requests)} requests, {self.open_caches} open caches>"

    @property
    def requests(self) -> list[verifier_pb2.CreateCacheRequest]:
        return self.creates

    @property
    def open_caches(self) -> int:
        return len(self.caches)

    async def get_model(self, request: verifier_pb2.GetModelRequest) -> Any:
        return await self.GetModel(request, _Context())

    async def create_cache(
        self, request: verifier_pb2.CreateCacheRequest
    ) -> AsyncGenerator[verifier_pb2.CreateCacheResponse, None]:
        async for response in self.CreateCache(request, _Context()):
            yield response

    def generate(self) -> Any:
        return MockStream(self)

    async def renew_lease(self, request: verifier_pb2.RenewLeaseRequest) -> None:
        await self.RenewLease(request, _Context())

    async def release_cache(self, request: verifier_pb2.ReleaseCacheRequest) -> None:
        await self.ReleaseCache(request, _Context())

    async def close(self) -> None:
        self.caches.clear()


class MockStream:
    """A stream of the fake; `credits` are those that it has not used."""

    def __init__(self, verifier: FakeVerifier) -> None:
        self.credits = 0
        self._sent: asyncio.Queue[verifier_pb2.GenerateRequest | None] = asyncio.Queue()
        self._responses = verifier.Generate(self._requests(), _Context())

    async def write(self, request: verifier_pb2.GenerateRequest) -> None:
        self.credits += request.credits
        self._sent.put_nowait(request)

    async def read(self) -> verifier_pb2.GenerateResponse | None:
        response: verifier_pb2.GenerateResponse | None = await anext(self._responses, None)
        if response is not None:
            self.credits -= sum(round_.steps for round_ in response.rounds)
        return response

    def cancel(self) -> None:
        self._sent.put_nowait(None)

    async def _requests(self) -> AsyncIterator[verifier_pb2.GenerateRequest]:
        while (request := await self._sent.get()) is not None:
            yield request


class _Context:
    """What the fake asks of a call."""

    def invocation_metadata(self) -> dict[str, str]:
        return {"paceline-client": "mock"}

    async def abort(self, code: object, details: str = "") -> NoReturn:
        raise NotFoundError("the mock has no such cache")

    abort_with_status = abort
