"""Users who ask for generations, and what they see."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np

from paceline.bench.load.workload import LENGTHS, TOKENS, Spell
from paceline.bench.prompts import Prompt
from paceline.client import Client, RoundStats

_WARM_SECONDS = 1.0  # of the open loop


@dataclass
class User:
    """What one generation's user saw inside the window. Times in milliseconds."""

    first_token: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Between messages."""
    tokens: int = 0
    """After the first message."""
    rounds: Sequence[RoundStats] = ()

    @property
    def per_second(self) -> float | None:
        """Tokens per second after the first message."""
        return self.tokens / sum(self.gaps) * 1e3 if sum(self.gaps) else None


@dataclass
class Window:
    """Tokens that came out between two times (time.perf_counter)."""

    begin: float = math.inf
    end: float = math.inf
    tokens: int = 0
    users: list[User] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """JSON-ready figures."""
        users = [user for user in self.users if user.gaps]
        rounds = [entry for user in users for entry in user.rounds]
        drafted = [entry for entry in rounds if entry.drafted]
        emitted = sum(entry.emitted for entry in rounds)
        return {
            "tokens_per_second": self.tokens / (self.end - self.begin),
            "generations": len(users),
            "user_tokens_per_second": _spread([u.per_second for u in users if u.per_second]),
            "first_token_ms": _spread([u.first_token for u in users if u.first_token is not None]),
            "between_messages_ms": _spread([gap for user in users for gap in user.gaps]),
            "per_token_ms": _spread([1e3 / u.per_second for u in users if u.per_second]),
            "drafted_share": sum(entry.emitted for entry in drafted) / max(1, emitted),
            "accepted_length": fmean(e.emitted for e in drafted) if drafted else None,
            "drafted_nodes": fmean(e.drafted for e in drafted) if drafted else None,
            "checked_nodes": fmean(e.checked for e in drafted) if drafted else None,
            "node_budget": fmean(e.node_budget for e in rounds) if rounds else None,
            "budget_0_share": fmean(e.node_budget == 0 for e in rounds) if rounds else None,
        }


class Load:
    """Generations against running services, prompt after prompt."""

    def __init__(self, client: Client, prompts: Sequence[Prompt], drafter: str, **options: Any):
        self._client = client
        self._prompts = prompts
        self._drafter = drafter
        self._options = options
        self._next = count()
        self._work: asyncio.Task[None] | None = None

    async def run(self, spell: Spell) -> Window:
        """What users see while they are watched. They go on until `stop`.

        Raises whatever a generation does.
        """
        self._next = count(spell.prompt)
        window, over = Window(), asyncio.Event()
        if spell.loop == "closed":
            work = self._crowd(int(spell.size), int(spell.much), window, over)
        else:
            work = self._arrivals(spell.size, spell.much, window, over)
        self._work = asyncio.create_task(work)
        watch = asyncio.create_task(over.wait())
        await asyncio.wait([self._work, watch], return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if self._work.done():
            self._work.result()  # users never end by themselves
        return window

    async def stop(self) -> None:
        """All users leave."""
        if self._work is not None:
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work

    async def _crowd(
        self, users: int, generations: int, window: Window, over: asyncio.Event
    ) -> None:
        """So many users, each of whom asks again as soon as a generation ends.

        They are watched from the end of one generation to that of another, so that the same work
        lies between: long prompts come in turns, and a window of some seconds would hold one more
        or less.
        """
        ended = 0

        async def user(index: int) -> None:
            nonlocal ended
            # The first generations differ in length, or all would take in prompts at the same time.
            tokens = TOKENS * (index + 1) // users or 1
            while True:
                await self._generate(window, tokens)
                tokens = TOKENS
                ended += 1
                if ended == users:
                    window.begin = time.perf_counter()
                if ended == users + generations:
                    window.end = time.perf_counter()
                    over.set()

        async with asyncio.TaskGroup() as group:
            for index in range(users):
                group.create_task(user(index))

    async def _arrivals(
        self, rate: float, seconds: float, window: Window, over: asyncio.Event
    ) -> None:
        """Users who come at random times, `rate` a second on average, whoever waits."""
        chance = random.Random(1)  # the same times for all modes
        window.begin = time.perf_counter() + _WARM_SECONDS
        window.end = window.begin + seconds
        asyncio.get_running_loop().call_later(_WARM_SECONDS + seconds, over.set)
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._generate(window, TOKENS))
                await asyncio.sleep(chance.expovariate(rate))

    async def _generate(self, window: Window, tokens: int) -> None:
        number = next(self._next)
        prompt = self._prompts[number % len(self._prompts)]
        began = time.perf_counter()
        generation = self._client.generate(
            prompt.tokens[-LENGTHS[number % len(LENGTHS)] :],
            max_new_tokens=tokens,
            drafter=self._drafter,
            ignore_eos=True,
            **self._options,
        )
        user = User(rounds=generation.stats.rounds)
        window.users.append(user)
        last = None
        async for chunk in generation:
            now = time.perf_counter()
            if window.begin <= now <= window.end:
                window.tokens += len(chunk.token_ids)
                if last is None:
                    user.first_token = (now - began) * 1e3
                else:
                    user.tokens += len(chunk.token_ids)
                    user.gaps.append((now - last) * 1e3)
            last = now


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
