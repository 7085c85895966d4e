"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ._client import Client
from ._errors import ClientClosedError
from ._fleet import VerifierStatus
from ._generation import Generation, GenerationResult
from ._options import ChatOptions, GenerationOptions, takes, takes_all
from ._output import Chunk
from ._text import Model

T = TypeVar("T")


class SyncClient:
    """`Client` with blocking calls, which run in the event loop of a thread.

    Takes the same arguments as `Client`. Several threads may use it.

        with SyncClient("127.0.0.1:7431") as client:
            print(client.generate("def main(").text)
    """

    @takes_all(Client)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._client = Client(*args, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="paceline-client", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return repr(self._client).replace("Client", "SyncClient", 1)

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @takes(GenerationOptions)
    def generate(self, prompt: str | Sequence[int], **options: Any) -> GenerationResult:
        """The result of `Client.generate`."""
        return self._result(self._client.generate(prompt, **options))

    @takes(GenerationOptions)
    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Chunk]:
        """The chunks of `Client.generate`. Leaving the loop early releases the cache."""
        return self._chunks(self._client.generate(prompt, **options))

    @takes(ChatOptions)
    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> GenerationResult:
        """The result of `Client.chat`."""
        return self._result(self._client.chat(messages, **options))

    @takes(ChatOptions)
    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[Chunk]:
        """The chunks of `Client.chat`. Leaving the loop early releases the cache."""
        return self._chunks(self._client.chat(messages, **options))

    def model(self) -> Model:
        """As `Client.model`."""
        return self._wait_for(self._client.model())

    def drafters(self) -> tuple[str, ...]:
        """As `Client.drafters`."""
        return self._wait_for(self._client.drafters())

    def verifiers(self) -> tuple[VerifierStatus, ...]:
        """As `Client.verifiers`."""
        return self._client.verifiers()

    def set_verifiers(self, addresses: str) -> None:
        """As `Client.set_verifiers`."""

        async def set_them() -> None:
            self._client.set_verifiers(addresses)

        self._wait_for(set_them())

    def close(self) -> None:
        """Stops all generations, disconnects, and ends the thread. Safe to call again."""
        if self._loop.is_closed():
            return
        self._wait_for(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _result(self, generation: Generation) -> GenerationResult:
        async def result() -> GenerationResult:
            return await generation

        return self._wait_for(result())

    def _chunks(self, generation: Generation) -> Iterator[Chunk]:
        chunks = aiter(generation)

        async def next_chunk() -> Chunk | None:
            return await anext(chunks, None)

        async def close() -> None:
            await chunks.aclose()

        try:
            while (chunk := self._wait_for(next_chunk())) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():
                self._wait_for(close())

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise ClientClosedError("the client is closed: create a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # stops the work after a KeyboardInterrupt here
            raise
