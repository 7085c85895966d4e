"""The texts of one request, generated concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
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


@dataclass
class _Prompt:
    """A prompt. Its first choice is prefilled, the others fork that cache."""

    tokens: list[int]
    first: Generation | None = None
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)


class Texts:
    """Generations of several prompts, each continued several times.

    Args:
        client: Client of the services.
        prompts: Token ids.
        choices: Arguments of `Client.generate` for each choice of a prompt.
    """

    def __init__(
        self,
        client: Client,
        prompts: Sequence[list[int]],
        choices: Sequence[dict[str, Any]],
    ) -> None:
        self._client = client
        self._prompts = [_Prompt(prompt) for prompt in prompts]
        self._choices = choices
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue(_QUEUE_SIZE)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Events of all texts. Closing it early stops all generations.

        Raises the first error of a generation, and stops the others.
        """
        tasks = [
            asyncio.create_task(self._generate(place * len(self._choices) + choice, prompt, choice))
            for place, prompt in enumerate(self._prompts)
            for choice in range(len(self._choices))
        ]
        left = len(tasks)
        try:
            while left:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                left -= event.result is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(p.first.aclose() for p in self._prompts if p.first))

    async def _generate(self, index: int, prompt: _Prompt, choice: int) -> None:
        try:
            generation = await self._begin(prompt, choice)
            async for chunk in generation:
                prompt.prefilled.set()
                await self._events.put(Event(index, chunk=chunk))
            prompt.prefilled.set()
            await self._events.put(Event(index, result=await generation))
        except Exception as error:
            await self._events.put(error)

    async def _begin(self, prompt: _Prompt, choice: int) -> Generation:
        """Starts a choice; the first one keeps its cache for the others to fork."""
        arguments = self._choices[choice]
        if choice == 0:
            shared = len(self._choices) > 1
            first = self._client.generate(prompt.tokens, keep_cache=shared, **arguments)
            prompt.first = first
            return first
        await prompt.prefilled.wait()
        return self._client.generate(prompt.tokens, parent=prompt.first, **arguments)
