"""Requests against running services, a fixed number at a time or at random times."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np

from paceline.bench.prompts import Prompt
from paceline.client import Client, RoundStats

PROMPT_TOKENS = (32, 96, 192, 384)
"""Prompt lengths, in turn."""

NEW_TOKENS = 128

_WARM_UP = 1.0  # seconds before the window of requests at random times


@dataclass
class Request:
    """One request inside the window. Times in milliseconds.

    Attributes:
        ttft: Time to the first token; None if it came outside the window.
        gaps: Times between messages.
        tokens: Tokens after the first message.
        rounds: All rounds of the request.
    """

    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    rounds: Sequence[RoundStats] = ()

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first message."""
        return sum(self.gaps) / self.tokens if self.tokens else None


@dataclass
class Window:
    """Tokens and requests between two values of time.perf_counter."""

    begin: float = math.inf
    end: float = math.inf
    tokens: int = 0
    requests: list[Request] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """JSON-ready figures."""
        requests = [request for request in self.requests if request.gaps]
        rounds = [entry for request in requests for entry in request.rounds]
        drafted = [entry for entry in rounds if entry.drafted]
        emitted = sum(entry.emitted for entry in rounds)
        return {
            "tokens_per_second": self.tokens / (self.end - self.begin),
            "requests": len(requests),
            "ttft_ms": _percentiles([r.ttft for r in requests if r.ttft is not None]),
            "tpot_ms": _percentiles([r.tpot for r in requests if r.tpot is not None]),
            "itl_ms": _percentiles([gap for request in requests for gap in request.gaps]),
            "drafted_share": sum(entry.emitted for entry in drafted) / max(1, emitted),
            "accepted_length": fmean(e.emitted for e in drafted) if drafted else None,
            "drafted_nodes": fmean(e.drafted for e in drafted) if drafted else None,
            "checked_nodes": fmean(e.checked for e in drafted) if drafted else None,
        }


class Load:
    """Requests for prompts in turn.

    Args:
        client: Client of the services.
        prompts: Cut to the lengths of `PROMPT_TOKENS`.
        drafter: Name of the drafter, or "none".
        options: More options of every request.
    """

    def __init__(self, client: Client, prompts: Sequence[Prompt], drafter: str, **options: Any):
        self._client = client
        self._prompts = prompts
        self._drafter = drafter
        self._options = options
        self._next = count()
        self._window = Window()
        self._over = asyncio.Event()

    async def concurrent(self, concurrency: int, requests: int, first: int = 0) -> Window:
        """Keep `concurrency` requests running.

        The window lies between the ends of two requests with `requests` of them between, so that it
        holds the same work in all modes.

        Args:
            concurrency: Requests at a time.
            requests: Requests that end inside the window.
            first: Number of the first prompt.
        """
        ended = 0

        async def user(index: int) -> None:
            nonlocal ended
            # First requests differ in length, or all prefills would come at the same time.
            tokens = max(1, NEW_TOKENS * (index + 1) // concurrency)
            while True:
                await self._request(tokens)
                tokens = NEW_TOKENS
                ended += 1
                if ended == concurrency:
                    self._window.begin = time.perf_counter()
                if ended == concurrency + requests:
                    self._window.end = time.perf_counter()
                    self._over.set()

        async def users() -> None:
            async with asyncio.TaskGroup() as group:
                for index in range(concurrency):
                    group.create_task(user(index))

        return await self._run(users, first)

    async def arriving(self, rate: float, seconds: float, first: int = 0) -> Window:
        """Begin `rate` requests a second at random times (Poisson), for `seconds`."""
        chance = random.Random(1)  # the same times in all modes

        async def arrivals() -> None:
            self._window.begin = time.perf_counter() + _WARM_UP
            self._window.end = self._window.begin + seconds
            asyncio.get_running_loop().call_later(_WARM_UP + seconds, self._over.set)
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(self._request(NEW_TOKENS))
                    await asyncio.sleep(chance.expovariate(rate))

        return await self._run(arrivals, first)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]], first: int) -> Window:
        """Run `work` until the window is over. Raises whatever a request does."""
        self._next, self._window, self._over = count(first), Window(), asyncio.Event()
        working = asyncio.create_task(work())
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([working, over], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        for task in (working, over):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return self._window

    async def _request(self, tokens: int) -> None:
        number, window = next(self._next), self._window
        prompt = self._prompts[number % len(self._prompts)]
        began = time.perf_counter()
        generation = self._client.generate(
            prompt.tokens[-PROMPT_TOKENS[number % len(PROMPT_TOKENS)] :],
            max_new_tokens=tokens,
            temperature=prompt.temperature,
            seed=prompt.seed,
            drafter=self._drafter,
            ignore_eos=True,
            **self._options,
        )
        request = Request(rounds=generation.stats.rounds)
        window.requests.append(request)
        last = None
        async for chunk in generation:
            now = time.perf_counter()
            if window.begin <= now <= window.end:
                window.tokens += len(chunk.token_ids)
                if last is None:
                    request.ttft = (now - began) * 1e3
                else:
                    request.tokens += len(chunk.token_ids)
                    request.gaps.append((now - last) * 1e3)
            last = now


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
