"""The queue of chunks for the reader of a generation."""

from __future__ import annotations

import asyncio

from ._output import Chunk


class ChunkQueue:
    """A queue between a generation and its reader. Without a reader it drops all chunks.

    `put` never waits, so that a free run's responses are always received. The generation checks
    `full` between rounds: the queue holds at most `limit` chunks and those of one round.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self.reading = False

    @property
    def full(self) -> bool:
        """Whether the generation should pause until the reader catches up."""
        return self._chunks.qsize() >= self._limit

    def put(self, chunk: Chunk) -> None:
        """Adds a chunk, if there is a reader."""
        if self.reading:
            self._chunks.put_nowait(chunk)

    def close(self) -> None:
        """Ends the queue."""
        self._chunks.put_nowait(None)

    def remove_limit(self) -> None:
        """Removes the limit, for a caller that awaits the result."""
        self._limit = 1 << 62
        self._room.set()

    async def get(self) -> Chunk | None:
        """The next chunk; None at the end of the queue."""
        chunk = await self._chunks.get()
        self._room.set()
        return chunk

    async def wait_for_room(self, seconds: float) -> bool:
        """Waits at most `seconds` for room; returns whether there is room."""
        if self.full:
            self._room.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._room.wait()
            except TimeoutError:
                return False
        return not self.full
