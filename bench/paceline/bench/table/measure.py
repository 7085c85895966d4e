"""All contestants on all prompts of one phase, by turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import zip_longest

from openai import OpenAIError

from paceline.bench.table.engines import Engine, Request
from paceline.bench.table.figures import Sample, sample
from paceline.harness import ProcessFailed

_WARM_UP = 64  # tokens in which verifier and client measure what rounds cost

Prompts = Mapping[str, Sequence[list[int]]]
"""Token ids of prompts by category."""


@dataclass(frozen=True)
class Phase:
    """What all cells of one start of the engines have in common.

    An engine sees a prompt once in each mode of a phase: those that remember texts of earlier
    requests cannot know the answer.

    Attributes:
        temperature: Of the sampling.
        users: Requests at a time.
        share: Of the time, beside the shares of other phases.
    """

    temperature: float
    users: int
    share: float

    def cell(self, category: str) -> str:
        """Name of a cell."""
        users = "1 user" if self.users == 1 else f"{self.users} users"
        return f"{category}, T = {self.temperature:g}, {users}"


@dataclass(frozen=True)
class Limits:
    """What ends a measurement, and what is measured.

    Attributes:
        tokens: Most new tokens of an answer.
        deadline: Value of time.monotonic.
        wanted: Whether a contestant takes part.
        known: Whether a sample exists: cell, contestant, group.
    """

    tokens: int
    deadline: float
    wanted: Callable[[str], bool]
    known: Callable[[str, str, str], bool]


async def measure(
    phase: Phase,
    engines: Sequence[Engine],
    prompts: Prompts,
    warm_up: list[int],
    limits: Limits,
    record: Callable[[str, str, dict[str, Sample]], None],
    log: Callable[[str], None],
) -> bool:
    """Record a sample for each contestant and group of prompts.

    Categories take turns, and the contestants of a group begin with another one each time.

    Args:
        phase: Sampling and users.
        engines: Those that do not start are left out.
        prompts: By category.
        warm_up: A prompt for the first request in each mode.
        limits: What ends the measurement.
        record: Called after every group with its cell, its number, and samples by contestant.
        log: Called with a message.

    Returns:
        Whether all was measured before the deadline.
    """
    async with AsyncExitStack() as stack:
        contestants: list[tuple[Engine, str]] = []
        for engine in engines:
            modes = [mode for mode in engine.modes if limits.wanted(f"{engine.name} {mode}")]
            if not modes or (phase.users > 1 and not engine.concurrent):
                continue
            try:
                await stack.enter_async_context(engine)
            except (OSError, ProcessFailed, OpenAIError) as error:
                log(f"without {engine.name}: {error}")
                continue
            contestants += [(engine, mode) for mode in modes]
        for engine, mode in contestants:
            await engine.answer(mode, Request(warm_up, _WARM_UP, phase.temperature, 0))
            log(f"{engine.name} {mode} is ready")
        for turn, (category, group, texts) in enumerate(_groups(prompts, phase.users)):
            cell, first = phase.cell(category), turn % max(1, len(contestants))
            found: dict[str, Sample] = {}
            for engine, mode in contestants[first:] + contestants[:first]:
                name = f"{engine.name} {mode}"
                if int(group) % engine.every or limits.known(cell, name, group):
                    continue
                if time.monotonic() > limits.deadline:
                    record(cell, group, found)
                    return False
                requests = [
                    Request(text, limits.tokens, phase.temperature, int(group) + 1)
                    for text in texts
                ]
                answers = await asyncio.gather(*(engine.answer(mode, each) for each in requests))
                found[name] = sample(answers, texts)
            record(cell, group, found)
            log(f"{cell}: prompt {int(group) + 1} of {len(prompts[category]) // phase.users}")
    return True


def _groups(prompts: Prompts, users: int) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Category, number, and prompts that are asked at a time; categories take turns."""
    columns = [
        [
            (category, str(number), list(texts[number * users : (number + 1) * users]))
            for number in range(len(texts) // users)
        ]
        for category, texts in prompts.items()
    ]
    yield from (each for row in zip_longest(*columns) for each in row if each is not None)
