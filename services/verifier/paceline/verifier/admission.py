"""Admission of generations to KV memory, in order of arrival."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import count

from paceline.verifier.engine.sequence import GenerationParams, Sequence

WAIT_SECONDS = 30.0
"""Longest wait of a request for memory. Then its client is told to come again."""

_MAX_WAITING = 1024
"""Maximum number of requests that wait for memory."""

_FIRST_EXPECTED = 256
"""Output tokens expected of a generation before any has ended."""

_NEWEST_SHARE = 1 / 16
"""Weight of the newest output in the running mean of lengths."""


class NoRoom(Exception):
    """A request waited too long for memory, or too many wait."""


class Admission:
    """Lets requests wait for memory, and learns how much a generation is expected to need.

    Requests are admitted in order of arrival, but generations that were released for lack of
    memory go first. No request is passed by another one, so a long text is not kept waiting by
    short ones. Used on the event loop.

    Attributes:
        expected_output: Running mean of the lengths of outputs. Unit: tokens.
    """

    def __init__(self) -> None:
        """Make an empty queue."""
        self.expected_output = float(_FIRST_EXPECTED)
        self._waiting: list[tuple[bool, int]] = []
        self._tickets = count()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Requests that wait for memory now."""
        return len(self._waiting)

    def expected_length(self, generation: GenerationParams) -> int:
        """Tokens that a generation is expected to have at its end."""
        so_far = len(generation.prompt) + len(generation.output)
        return min(so_far + math.ceil(self.expected_output), generation.length_limit)

    def ended(self, sequence: Sequence) -> None:
        """Learn from the length of a generation that has ended."""
        if sequence.finish is not None:
            output = len(sequence.tokens) - len(sequence.generation.prompt)
            self.expected_output += _NEWEST_SHARE * (output - self.expected_output)

    async def wait(self, generation: GenerationParams, has_room: Callable[[], bool]) -> None:
        """Wait until it is a request's turn and there is room for it.

        Raises:
            NoRoom: It waited too long, or too many wait.
        """
        if len(self._waiting) >= _MAX_WAITING:
            raise NoRoom(f"{len(self._waiting)} requests wait for KV memory")
        ticket = (not generation.output, next(self._tickets))
        self._waiting.append(ticket)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while ticket != min(self._waiting) or not has_room():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoRoom(f"there was no KV memory for {WAIT_SECONDS:g} seconds") from None
        finally:
            self._waiting.remove(ticket)
            self.wake()

    def wake(self) -> None:
        """Have waiting requests look for memory again."""
        self._changed.set()
