"""The texts of one request, generated concurrently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.client import (
    CapacityError,
    Chunk,
    Client,
    Generation,
    GenerationResult,
    TokenLogprob,
)

# Events in the queue of a slow reader. Each generation has a queue of its own.
_QUEUE_SIZE = 64
# Most texts of one request at once. More would not make a step of the verifier more efficient.
_AT_ONCE = 64


@dataclass(frozen=True)
class Event:
    """A chunk or the end of one text."""

    index: int
    """Index of the text: prompt by prompt, each with its n choices."""
    chunk: Chunk | None = None
    """The next chunk."""
    result: GenerationResult | None = None
    """The result, in the last event of this text."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of the prompt, if requested."""


async def generate_texts(
    client: Client, prompts: Sequence[list[int]], choices: Sequence[dict[str, Any]]
) -> AsyncGenerator[Event, None]:
    """Generates all choices of all prompts concurrently, in the order of the prompts.

    The first choice of a prompt is prefilled, the others fork its cache. Where the verifier has no
    memory for another prompt, it waits for one of the same request to end. Closing the generator
    early stops all generations. An error of one stops the others and is raised.

    Args:
        client: Client of the services.
        prompts: Token ids.
        choices: Arguments of `Client.generate` for each choice of a prompt.
    """
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(_QUEUE_SIZE)
    waiting = deque(range(len(prompts)))
    working = max(1, min(len(prompts), _AT_ONCE // len(choices)))

    async def report(
        index: int, generation: Generation, parent: Generation, began: asyncio.Event
    ) -> None:
        async for chunk in generation:
            began.set()
            await events.put(Event(index, chunk, prompt_logprobs=parent.prompt_logprobs))
        result = await generation
        began.set()
        await events.put(Event(index, result=result, prompt_logprobs=parent.prompt_logprobs))

    async def generate(number: int) -> None:
        """All choices of a prompt."""
        prompt, first = prompts[number], number * len(choices)
        parent = client.generate(prompt, keep_cache=len(choices) > 1, **choices[0])
        began = asyncio.Event()

        async def fork(choice: int) -> None:
            await began.wait()
            generation = client.generate(prompt, parent=parent, **choices[choice])
            await report(first + choice, generation, parent, began)

        forks = [asyncio.create_task(fork(choice)) for choice in range(1, len(choices))]
        try:
            await report(first, parent, parent, began)
            await asyncio.gather(*forks)
        except CapacityError:
            if began.is_set() or working == 1:
                raise
            waiting.appendleft(number)
        finally:
            for task in forks:
                task.cancel()
            await asyncio.gather(*forks, return_exceptions=True)
            await parent.aclose()

    async def work() -> None:
        nonlocal working
        try:
            while waiting:
                number = waiting.popleft()
                await generate(number)
                if number in waiting:
                    break  # no memory: fewer at once from now on
        except Exception as error:
            await events.put(error)
        finally:
            working -= 1

    tasks = [asyncio.create_task(work()) for _ in range(working)]
    left = len(prompts) * len(choices)
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
