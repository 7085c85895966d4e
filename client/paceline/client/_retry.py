"""Exponential back-off with jitter, bounded by a budget of time."""

from __future__ import annotations

import asyncio
import random
from time import monotonic

from ._errors import PacelineError
from ._options import RetryOptions


class Attempts:
    """Paces attempts at one thing until it succeeds or the budget is spent."""

    def __init__(self, options: RetryOptions) -> None:
        self._options = options
        self._since: float | None = None
        self._delay = options.first_delay

    async def pause(self, error: PacelineError, *, within_deadline: bool = False) -> None:
        """Waits before the next attempt, at least as long as the service asked for.

        Raises `error` when the wait would exceed the budget; with `within_deadline` the caller's
        own deadline bounds the attempts instead.
        """
        now = monotonic()
        self._since = self._since if self._since is not None else now
        delay = max(self._delay * random.uniform(0.5, 1.0), error.retry_after or 0.0)
        if not within_deadline and now + delay - self._since > self._options.budget:
            raise error
        self._delay = min(2 * self._delay, self._options.longest_delay)
        await asyncio.sleep(delay)

    def succeeded(self) -> None:
        """The next failure starts afresh."""
        self._since = None
        self._delay = self._options.first_delay
