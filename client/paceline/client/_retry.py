"""Retries with exponential back-off and jitter, limited in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from ._errors import PacelineError, UnavailableError
from ._options import RetryOptions

T = TypeVar("T")


class Attempts:
    """Delays between attempts at one operation, until it succeeds or the budget is spent."""

    def __init__(self, options: RetryOptions) -> None:
        self._options = options
        self._since: float | None = None
        self._delay = options.first_delay

    async def pause(self, error: PacelineError, *, within_deadline: bool = False) -> None:
        """Waits before the next attempt, at least `error.retry_after`.

        Raises `error` if the wait would exceed the budget. With `within_deadline` the deadline of
        the generation limits the attempts instead.
        """
        now = monotonic()
        self._since = self._since if self._since is not None else now
        delay = max(self._delay * random.uniform(0.5, 1.0), error.retry_after or 0.0)
        if not within_deadline and now + delay - self._since > self._options.budget:
            raise error
        self._delay = min(2 * self._delay, self._options.longest_delay)
        await asyncio.sleep(delay)

    def succeeded(self) -> None:
        """Resets budget and delay."""
        self._since = None
        self._delay = self._options.first_delay


async def retry_unavailable(call: Callable[[], Awaitable[T]], attempts: Attempts) -> T:
    """Repeats a call that raises UnavailableError; the last one when the budget is spent."""
    while True:
        try:
            return await call()
        except UnavailableError as error:
            await attempts.pause(error)
