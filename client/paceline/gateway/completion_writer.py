"""Responses of `/v1/completions`, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.client import Chunk, GenerationResult, TokenLogprob

from .logprobs import joined, of_completion, of_prompt
from .writers import Asked, ChoicesWriter, Json, Text


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
