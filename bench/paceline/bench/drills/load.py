"""Generations without pause, each compared with its expected tokens, and the outcome of a drill."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from time import monotonic

from paceline.client import Client


@dataclass
class Outcome:
    """The outcome of a drill."""

    checks: dict[str, bool] = field(default_factory=dict)  # what must hold, and whether it did
    # What was measured on the way.
    figures: dict[str, float | int | str] = field(default_factory=dict)
    skipped: str = ""  # why the drill cannot run on this machine; empty if it ran

    @property
    def passed(self) -> bool:
        return not self.skipped and all(self.checks.values())


@dataclass(frozen=True)
class Text:
    """A prompt, the seed of its continuation at temperature 1, and the expected tokens."""

    prompt: list[int]
    seed: int
    expected: list[int]


class Load:
    """Counts of the generations of :func:`running`."""

    def __init__(self, client: Client, texts: list[Text], drafter: str | None) -> None:
        self.finished = 0
        self.wrong = 0
        self.drafted_rounds = 0
        self.failures: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.versions: set[str] = set()  # drafter versions whose trees were verified
        self.verifiers: set[str] = set()  # addresses of the verifiers that generated
        self.slowest_stall = 0.0  # longest time between two chunks of a text. Unit: seconds.
        self._client = client
        self._texts = texts
        self._drafter = drafter
        self._next = count()
        self._newest_begin = {False: 0.0, True: 0.0}
        self._ended = asyncio.Event()

    async def more(self, generations: int) -> None:
        goal = self.finished + self.failures.total() + generations
        while self.finished + self.failures.total() < goal:
            await self._next_end()

    async def recovered(self, limit: float, *, drafted: bool) -> float:
        """Seconds until a generation that began from now on has succeeded; inf after `limit`.

        Args:
            limit: Unit: seconds.
        """
        now = monotonic()
        try:
            async with asyncio.timeout(limit):
                while self._newest_begin[drafted] < now:
                    await self._next_end()
        except TimeoutError:
            return float("inf")
        return monotonic() - now

    def report(self, outcome: Outcome) -> None:
        """Add the checks and figures of any load to an outcome."""
        outcome.checks["tokens identical"] = self.wrong == 0 and self.finished > 0
        outcome.checks["no request failed"] = not self.failures
        outcome.figures["generations"] = self.finished
        outcome.figures["drafted rounds"] = self.drafted_rounds
        for name, counts in (("failures", self.failures), ("fallbacks", self.fallbacks)):
            if counts:
                outcome.figures[name] = str(dict(counts))

    async def generate(self) -> None:
        text = self._texts[next(self._next) % len(self._texts)]
        began = monotonic()
        generation = self._client.generate(
            text.prompt,
            max_new_tokens=len(text.expected),
            temperature=1.0,
            seed=text.seed,
            ignore_eos=True,
            drafter=self._drafter,
        )
        try:
            chunk_at = None
            async for _ in generation:
                before, chunk_at = chunk_at, monotonic()
                self.slowest_stall = max(self.slowest_stall, chunk_at - (before or chunk_at))
            result = await generation
        except Exception as error:
            self.failures[f"{type(error).__name__}: {error}"[:200]] += 1
        else:
            stats = result.stats
            self.finished += 1
            self.wrong += result.token_ids != text.expected
            self.fallbacks += stats.fallbacks
            self.versions.update(stats.drafter_versions)
            self.verifiers.update(stats.verifiers)
            self.drafted_rounds += stats.drafted_rounds
            for drafted in {False, stats.drafted_rounds > 0}:
                self._newest_begin[drafted] = max(self._newest_begin[drafted], began)
        self._ended.set()

    async def _next_end(self) -> None:
        self._ended.clear()
        await self._ended.wait()


@asynccontextmanager
async def running(
    client: Client, texts: list[Text], concurrency: int, drafter: str | None = None
) -> AsyncIterator[Load]:
    """Keep `concurrency` generations running for the body, and let them end after it.

    The body begins when as many have ended.

    Args:
        drafter: Name of the drafter; None: the default one.
    """
    load, stopping = Load(client, texts, drafter), asyncio.Event()

    async def run() -> None:
        while not stopping.is_set():
            await load.generate()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(run())
        await load.more(concurrency)
        yield load
        stopping.set()
