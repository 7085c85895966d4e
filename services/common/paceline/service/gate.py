"""Counts generations in flight, for draining."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.service.errors import ServiceError


class Gate:
    """Admits generations until it is closed, and waits for those in flight.

    Not thread-safe: used on one event loop. A service enters it once per generation, and closes
    and awaits it in `Service.drain`.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """Number of generations in flight."""
        return self._inside

    @property
    def closed(self) -> bool:
        """True once the service drains."""
        return self._closed

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a generation in flight for the body.

        Raises:
            ServiceError: UNAVAILABLE with reason DRAINING after `close`.
        """
        if self._closed:
            raise ServiceError.unavailable(
                "DRAINING",
                "the service is shutting down and takes no new generations; "
                "try another instance, or this one again after its restart",
            )
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    def close(self) -> None:
        """Refuse new work from now on."""
        self._closed = True

    async def drained(self) -> None:
        """Return when no generation is in flight."""
        await self._empty.wait()
