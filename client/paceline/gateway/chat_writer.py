"""Responses of `/v1/chat/completions`, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.client import Chunk, GenerationResult, TokenLogprob

from .calls import Call, CallParser
from .logprobs import joined, of_chat
from .tools import ToolUse
from .writers import Asked, ChoicesWriter, Json, Text


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


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(result: GenerationResult, parser: CallParser) -> str:
    return "tool_calls" if parser.calls and result.finish_reason == "stop" else result.finish_reason
