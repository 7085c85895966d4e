"""Responses in OpenAI's format, extended by `seed` in choices and `speculation` in usage."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.client import Chunk, GenerationResult, Model, Stats, TokenLogprob

from .requests import StreamOptions

Json = dict[str, Any]


@dataclass
class Text:
    """One text of a request, as far as it is known."""

    chunks: list[Chunk] = field(default_factory=list)
    result: GenerationResult | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Asked:
    """What the response says of the request."""

    model: Model
    name: str
    """Name of the model in the response."""
    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    choices: int = 1
    """Texts per prompt."""
    options: StreamOptions = field(default_factory=StreamOptions)

    def prompt_of(self, index: int) -> int:
        """Index of a text's prompt."""
        return index // self.choices


class Writer(ABC):
    """Formats the response to one request: whole, or as events of a stream."""

    last = b""
    """What a stream ends with."""

    @abstractmethod
    def whole(self, texts: Sequence[Text]) -> Json:
        """The response as a whole."""

    @abstractmethod
    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """The first events of a text."""

    @abstractmethod
    def chunk(self, index: int, chunk: Chunk) -> list[Json]:
        """Events of a chunk."""

    @abstractmethod
    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """The last events of a text."""

    @abstractmethod
    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        """Events after all texts."""


class ChoicesWriter(Writer):
    """What both kinds of completion share: choices, and events with one choice each.

    Args:
        asked: The request.
    """

    last = b"data: [DONE]\n\n"
    object = ""
    object_of_event = ""
    prefix = ""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._codec = asked.model.codec
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        """The event with `usage`, if it was asked for."""
        if not self._asked.options.include_usage:
            return []
        return [self._head(self.object_of_event, [], usage(self._asked, results))]

    def _head(self, kind: str, choices: list[Json], used: Json | None) -> Json:
        fingerprint = self._asked.model.facts.target_fingerprint[:12]
        head = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.name,
            "system_fingerprint": f"fp_{fingerprint}",
            "choices": choices,
        }
        # With usage at the end, OpenAI's earlier events have an empty one.
        return head | {"usage": used} if used or self._asked.options.include_usage else head

    def _whole(self, texts: Sequence[Text], bodies: Sequence[Json]) -> Json:
        results = [text.result for text in texts if text.result is not None]
        choices = [
            {"index": index, **body, "seed": result.seed}
            for index, (body, result) in enumerate(zip(bodies, results, strict=True))
        ]
        return self._head(self.object, choices, usage(self._asked, results))

    def _event(self, index: int, body: Json, logprobs: Json | None = None) -> Json:
        choice = {"index": index, **body, "logprobs": logprobs or None, "finish_reason": None}
        return self._head(self.object_of_event, [choice], None)

    def _last_event(self, index: int, body: Json, reason: str, seed: int) -> Json:
        event = self._event(index, body)
        event["choices"][0] |= {"finish_reason": reason, "seed": seed}
        return event

    def _with_round(self, event: Json, chunk: Chunk) -> Json:
        if self._asked.options.include_rounds:
            event["choices"][0]["round"] = self._round(chunk)
        return event

    def _round(self, chunk: Chunk) -> Json:
        tree = None
        if chunk.tree is not None and self._codec is not None:
            tree = {
                "tokens": [self._codec.token_text(token) for token in chunk.tree.tokens],
                "parents": chunk.tree.parents,
                "accepted": chunk.tree.accepted,
            }
        return {
            "index": chunk.round,
            "tokens": len(chunk.token_ids),
            "token_ids": chunk.token_ids,
            "pieces": chunk.pieces,
            "proposed_by": chunk.proposed_by,
            "tree": tree,
            "undrafted": chunk.undrafted,
        }


def usage(asked: Asked, results: Sequence[GenerationResult]) -> Json:
    """Tokens, each prompt counted once, and speculation statistics of all texts."""
    prompt, stats = sum(map(len, asked.prompts)), Stats()
    for result in results:
        stats.merge(result.stats)
    completion = sum(result.usage.completion_tokens for result in results)
    first_choices = results[:: asked.choices]
    cached = sum(result.usage.reused_tokens for result in first_choices)
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "speculation": stats.summary(),
    }
