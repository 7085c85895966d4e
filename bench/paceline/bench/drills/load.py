"""Generations without pause, each compared with what it should be."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import count
from time import monotonic
from types import TracebackType
from typing import Self

from paceline.bench.drills.drill import Outcome
from paceline.client import Client


@dataclass(frozen=True)
class Text:
    """A prompt, how its continuation is sampled, and what that must be."""

    prompt: list[int]
    seed: int
    expected: list[int]


class Load(AbstractAsyncContextManager["Load"]):
    """Keeps a number of generations running for the body; on leaving lets them end.

    Args:
        client: Whose they are.
        texts: Taken in turn; sampled at temperature 1.
        slots: Generations at a time.
        drafter: Name of their drafter; None: the default one.
    """

    def __init__(
        self, client: Client, texts: list[Text], slots: int, drafter: str | None = None
    ) -> None:
        self.finished = 0
        self.wrong = 0
        self.failures: Counter[str] = Counter()
        """Generations that raised, by what."""
        self.fallbacks: Counter[str] = Counter()
        self.versions: set[str] = set()
        """Versions whose trees were verified."""
        self.drafted_rounds = 0
        self._client = client
        self._texts = texts
        self._slots = slots
        self._drafter = drafter
        self._next = count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._newest_begin: dict[bool, float] = {False: 0.0, True: 0.0}
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._slots)]
        await self.more(self._slots)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def more(self, generations: int) -> None:
        """Wait until so many more have ended."""
        goal = self.finished + sum(self.failures.values()) + generations
        while self.finished + sum(self.failures.values()) < goal:
            self._news.clear()
            await self._news.wait()

    async def recovered(self, limit: float, *, drafted: bool = False) -> float:
        """Seconds until a generation that began from now on has ended well; inf after ``limit``.

        Args:
            limit: Unit: seconds.
            drafted: It must have been drafted for, too.
        """
        now = monotonic()
        try:
            async with asyncio.timeout(limit):
                while self._newest_begin[drafted] < now:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return float("inf")
        return monotonic() - now

    def judge(self, outcome: Outcome) -> None:
        """Enter what must hold of any load, and its figures."""
        outcome.checks["tokens identical"] = self.wrong == 0 and self.finished > 0
        outcome.checks["no request failed"] = not self.failures
        outcome.figures["generations"] = self.finished
        outcome.figures["drafted rounds"] = self.drafted_rounds
        if self.failures:
            outcome.figures["failures"] = str(dict(self.failures))
        if self.fallbacks:
            outcome.figures["fallbacks"] = str(dict(self.fallbacks))

    async def _run(self) -> None:
        while not self._stopping:
            text = self._texts[next(self._next) % len(self._texts)]
            began = monotonic()
            try:
                result = await self._client.generate(
                    text.prompt,
                    max_new_tokens=len(text.expected),
                    temperature=1.0,
                    seed=text.seed,
                    ignore_eos=True,
                    drafter=self._drafter,
                )
            except Exception as error:
                self.failures[f"{type(error).__name__}: {error}"[:200]] += 1
            else:
                self.finished += 1
                self.wrong += result.token_ids != text.expected
                self.fallbacks += result.stats.fallbacks
                self.versions.update(result.stats.drafter_versions)
                self.drafted_rounds += result.stats.drafted_rounds
                for drafted in {False, result.stats.drafted_rounds > 0}:
                    self._newest_begin[drafted] = max(self._newest_begin[drafted], began)
            self._news.set()
