"""Responses in OpenAI's format, extended by `seed` in choices and `speculation` in usage."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.client import Chunk, GenerationResult, Model, Stats, TokenLogprob

from .calls import Call, CallParser
from .logprobs import joined, of_chat, of_completion, of_prompt
from .requests import StreamOptions
from .tools import ToolUse

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


class CompletionWriter(ChoicesWriter):
    """`/v1/completions`.

    Args:
        asked: The request.
        echoes: Text before the completions of each prompt; None: without `echo`.
    """

    object = object_of_event = "text_completion"
    prefix = "cmpl"

    def __init__(self, asked: Asked, echoes: Sequence[str] | None) -> None:
        super().__init__(asked)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def whole(self, texts: Sequence[Text]) -> Json:
        """The response as a whole."""
        bodies = []
        for index, text in enumerate(texts):
            assert text.result is not None
            logprobs = [self._prompt(index, text.prompt_logprobs)]
            logprobs += [self._logprobs(index, chunk) for chunk in text.chunks]
            bodies.append(
                {
                    "text": self._echo(index) + text.result.text,
                    "logprobs": joined(logprobs) or None,
                    "finish_reason": text.result.finish_reason,
                }
            )
        return self._whole(texts, bodies)

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """The echo."""
        logprobs = self._prompt(index, prompt_logprobs)
        return [self._event(index, {"text": self._echo(index)}, logprobs)]

    def chunk(self, index: int, chunk: Chunk) -> list[Json]:
        """One event."""
        event = self._event(index, {"text": chunk.text}, self._logprobs(index, chunk))
        return [self._with_round(event, chunk)]

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """The finish reason."""
        return [self._last_event(index, {"text": ""}, result.finish_reason, result.seed)]

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[self._asked.prompt_of(index)]

    def _prompt(self, index: int, entries: Sequence[TokenLogprob]) -> Json:
        """Log-probabilities of an echoed prompt."""
        self._offsets[index] = len(self._echo(index))
        if self._echoes is None or not entries or self._codec is None:
            return {}
        return of_prompt(self._asked.prompts[self._asked.prompt_of(index)], entries, self._codec)

    def _logprobs(self, index: int, chunk: Chunk) -> Json:
        offset = self._offsets[index]
        self._offsets[index] = offset + len(chunk.text)
        if not chunk.logprobs or self._codec is None:
            return {}
        return of_completion(chunk.logprobs, chunk.pieces, self._codec, offset)


class ChatWriter(ChoicesWriter):
    """`/v1/chat/completions`.

    Args:
        asked: The request.
        use: Its tools.
    """

    object, object_of_event = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, asked: Asked, use: ToolUse) -> None:
        super().__init__(asked)
        self._use = use
        self._parsers: dict[int, CallParser] = {}

    def whole(self, texts: Sequence[Text]) -> Json:
        """The response as a whole."""
        bodies = []
        for text in texts:
            assert text.result is not None
            parser = CallParser(self._use)
            parts = parser.push(text.result.text) + parser.flush()
            content = "".join(part for part in parts if isinstance(part, str))
            calls = [_call(part) for part in parts if isinstance(part, Call)]
            message: Json = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            logprobs = [self._logprobs(chunk) for chunk in text.chunks]
            bodies.append(
                {
                    "message": message,
                    "logprobs": joined(logprobs) or None,
                    "finish_reason": _reason(text.result, parser),
                }
            )
        return self._whole(texts, bodies)

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """The role."""
        self._parsers[index] = CallParser(self._use)
        return [self._event(index, {"delta": {"role": "assistant", "content": ""}})]

    def chunk(self, index: int, chunk: Chunk) -> list[Json]:
        """An event for each part of the text; the first has the log-probabilities."""
        parts = self._parsers[index].push(chunk.text)
        first, *others = self._deltas(index, parts) or [{"content": ""}]
        event = self._event(index, {"delta": first}, self._logprobs(chunk))
        rest = [self._event(index, {"delta": delta}) for delta in others]
        return [self._with_round(event, chunk), *rest]

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """The rest of the text, and the finish reason."""
        parser = self._parsers[index]
        events = [
            self._event(index, {"delta": delta}) for delta in self._deltas(index, parser.flush())
        ]
        reason = _reason(result, parser)
        return [*events, self._last_event(index, {"delta": {}}, reason, result.seed)]

    def _deltas(self, index: int, parts: Sequence[str | Call]) -> list[Json]:
        number = self._parsers[index].calls - sum(isinstance(part, Call) for part in parts)
        deltas: list[Json] = []
        for part in parts:
            if isinstance(part, str):
                deltas.append({"content": part})
            else:
                deltas.append({"tool_calls": [{"index": number, **_call(part)}]})
                number += 1
        return deltas

    def _logprobs(self, chunk: Chunk) -> Json:
        if not chunk.logprobs or self._codec is None:
            return {}
        return of_chat(chunk.logprobs, self._codec)


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


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(result: GenerationResult, parser: CallParser) -> str:
    return "tool_calls" if parser.calls and result.finish_reason == "stop" else result.finish_reason
