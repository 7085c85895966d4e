"""Where chunks wait for their reader."""

from __future__ import annotations

import asyncio
from collections import deque

from ._output import Chunk


class Outlet:
    """A queue between a generation and its one reader. Keeps nothing while nobody means to read.

    `put` never waits, so that a free run's messages are always taken in; the generation looks at
    `full` between rounds. What waits is therefore bounded by `limit` and one round.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[Chunk] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False
        self.reading = False

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that the generation should rest."""
        return len(self._chunks) >= self._limit

    def put(self, chunk: Chunk) -> None:
        """Adds a chunk if there is a reader."""
        if self.reading:
            self._chunks.append(chunk)
            self._news.set()

    def close(self) -> None:
        """No chunk will follow."""
        self._closed = True
        self._news.set()

    def lift(self) -> None:
        """The end was asked for: never rest again."""
        self._limit = 1 << 62
        self._room.set()

    async def get(self) -> Chunk | None:
        """The next chunk; None after the last."""
        while not self._chunks:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self._room.set()
        return chunk

    async def room(self, seconds: float) -> bool:
        """Waits until it is no longer full, at most `seconds`; whether there is room."""
        if self.full:
            self._room.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._room.wait()
            except TimeoutError:
                return False
        return not self.full
