"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from ._client import Client
from ._errors import ClientClosedError
from ._generation import GenerationResult
from ._options import GenerationOptions, takes
from ._output import Chunk
from ._text import Model

T = TypeVar("T")


class SyncClient:
    """`Client` with blocking calls, which run in the event loop of a thread.

    Takes the same arguments as `Client`. Several threads may use it.

        with SyncClient("127.0.0.1:7431", drafter="127.0.0.1:7432") as client:
            print(client.generate("def main(").text)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = Client(*args, **kwargs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="paceline-client", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @takes(GenerationOptions)
    def generate(self, prompt: str | Sequence[int], **options: Any) -> GenerationResult:
        """The result of `Client.generate`."""

        async def run() -> GenerationResult:
            return await self._client.generate(prompt, **options)

        return self._wait_for(run())

    @takes(GenerationOptions)
    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Chunk]:
        """The chunks of `Client.generate`. Leaving the loop early releases the cache."""
        chunks = aiter(self._client.generate(prompt, **options))

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

    def model(self) -> Model:
        """As `Client.model`."""
        return self._wait_for(self._client.model())

    def close(self) -> None:
        """Stops all generations, disconnects, and ends the thread. Safe to call again."""
        if self._loop.is_closed():
            return
        self._wait_for(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

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
