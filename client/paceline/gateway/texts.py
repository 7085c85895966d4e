"""The texts of one request, generated all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.client import Chunk, Client, Generation, GenerationResult

# Chunks that may wait for a slow reader. Each generation keeps more of its own.
_WAITING = 64


@dataclass(frozen=True)
class Event:
    """News of one text."""

    index: int
    """Which text: prompt by prompt, and of each prompt its n choices."""
    chunk: Chunk | None = None
    """More of it."""
    result: GenerationResult | None = None
    """All of it; the last event of this text."""


@dataclass
class _Prompt:
    """A prompt whose KV is computed for its first choice and shared by the others."""

    tokens: list[int]
    leader: Generation | None = None
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)


class Texts:
    """Generations of several prompts, each continued several times.

    Args:
        client: generates.
        prompts: token ids.
        choices: arguments of `Client.generate` for each of a prompt's choices.
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
        self._news: asyncio.Queue[Event | Exception] = asyncio.Queue(_WAITING)

    async def events(self) -> AsyncGenerator[Event, None]:
        """News of all texts as they come. Closing it early stops and frees all of them.

        Raises the first error of any of them, and stops the others.
        """
        tasks = [
            asyncio.create_task(self._generate(place * len(self._choices) + choice, prompt, choice))
            for place, prompt in enumerate(self._prompts)
            for choice in range(len(self._choices))
        ]
        left = len(tasks)
        try:
            while left:
                event = await self._news.get()
                if isinstance(event, Exception):
                    raise event
                left -= event.result is not None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(p.leader.aclose() for p in self._prompts if p.leader))

    async def _generate(self, index: int, prompt: _Prompt, choice: int) -> None:
        try:
            generation = await self._begin(prompt, choice)
            async for chunk in generation:
                prompt.prefilled.set()
                await self._news.put(Event(index, chunk=chunk))
            prompt.prefilled.set()
            await self._news.put(Event(index, result=await generation))
        except Exception as error:
            await self._news.put(error)

    async def _begin(self, prompt: _Prompt, choice: int) -> Generation:
        """The first choice keeps its cache, so that the others find the prompt's KV in it."""
        arguments = self._choices[choice]
        if choice == 0:
            shared = len(self._choices) > 1
            leader = self._client.generate(prompt.tokens, keep_cache=shared, **arguments)
            prompt.leader = leader
            return leader
        await prompt.prefilled.wait()
        return self._client.generate(prompt.tokens, parent=prompt.leader, **arguments)
