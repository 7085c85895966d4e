"""The texts of one request, generated concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.client import Chunk, Client, Generation, GenerationResult

# Events in the queue of a slow reader. Each generation has a queue of its own.
_QUEUE_SIZE = 64


@dataclass(frozen=True)
class Event:
    """A chunk or the end of one text."""

    index: int
    """Index of the text: prompt by prompt, each with its n choices."""
    chunk: Chunk | None = None
    """The next chunk."""
    result: GenerationResult | None = None
    """The result, in the last event of this text."""


async def generate_texts(
    client: Client, prompts: Sequence[list[int]], choices: Sequence[dict[str, Any]]
) -> AsyncGenerator[Event, None]:
    """Generates all choices of all prompts concurrently.

    The first choice of a prompt is prefilled, the others fork its cache. Closing the generator
    early stops all generations. An error of one stops the others and is raised.

    Args:
        client: Client of the services.
        prompts: Token ids.
        choices: Arguments of `Client.generate` for each choice of a prompt.
    """
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(_QUEUE_SIZE)
    parents: list[Generation] = []

    async def run(
        index: int, prompt: list[int], choice: int, parent: Generation, prefilled: asyncio.Event
    ) -> None:
        try:
            generation = parent
            if choice:
                await prefilled.wait()
                generation = client.generate(prompt, parent=parent, **choices[choice])
            async for chunk in generation:
                prefilled.set()
                await events.put(Event(index, chunk=chunk))
            prefilled.set()
            await events.put(Event(index, result=await generation))
        except Exception as error:
            await events.put(error)

    tasks: list[asyncio.Task[None]] = []
    for prompt in prompts:
        parent = client.generate(prompt, keep_cache=len(choices) > 1, **choices[0])
        parents.append(parent)
        prefilled = asyncio.Event()
        for choice in range(len(choices)):
            work = run(len(tasks), prompt, choice, parent, prefilled)
            tasks.append(asyncio.create_task(work))
    left = len(tasks)
    try:
        while left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            left -= event.result is not None
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(parent.aclose() for parent in parents))
