"""Responses in OpenAI's format, extended by `seed` in choices and `speculation` in usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from paceline.client import Chunk, GenerationResult, Model, Stats, TextCodec, TokenLogprob

Kind = Literal["completion", "chat"]
Json = dict[str, Any]

_OBJECTS: dict[tuple[Kind, bool], str] = {
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
}
_PREFIX: dict[Kind, str] = {"completion": "cmpl", "chat": "chatcmpl"}


class Writer:
    """Formats the response to one request, whole or as events.

    Args:
        kind: The interface.
        name: Model name in the request.
        model: Served model.
        prompts: Number of tokens of each prompt.
        echoes: Text before the completions of each prompt; may be empty.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        model: Model,
        prompts: Sequence[int],
        echoes: Sequence[str],
    ) -> None:
        self._kind: Kind = kind
        self._name = name
        self._codec = model.codec
        self._fingerprint = f"fp_{model.facts.target_fingerprint[:12]}"
        self._prompts = prompts
        self._echoes = echoes
        self._id = f"{_PREFIX[kind]}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}

    def whole(self, texts: Sequence[tuple[list[Chunk], GenerationResult]]) -> Json:
        """The response as a whole."""
        results = [result for _, result in texts]
        choices = []
        for index, (chunks, result) in enumerate(texts):
            text = self._echo(index, len(texts)) + result.text
            logprobs = [self._logprobs(index, chunk) for chunk in chunks]
            body: Json = {"text": text}
            if self._kind == "chat":
                body = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(
                {
                    "index": index,
                    **body,
                    "logprobs": _joined(logprobs) or None,
                    "finish_reason": result.finish_reason,
                    "seed": result.seed,
                }
            )
        return {**self._head(stream=False), "choices": choices, "usage": self.usage(results)}

    def opening(self, index: int, texts: int) -> Json:
        """The first event of a text: the role in a chat, the echo of a completion."""
        text = self._echo(index, texts)
        return self._event(index, self._delta(text, opening=True), None)

    def chunk(self, index: int, chunk: Chunk, *, rounds: bool) -> Json:
        """An event with a chunk of a text; with `rounds` also its round."""
        logprobs = self._logprobs(index, chunk)
        event = self._event(index, self._delta(chunk.text), logprobs or None)
        if rounds:
            event["choices"][0]["round"] = self._round(chunk)
        return event

    def ending(self, index: int, result: GenerationResult) -> Json:
        """The last event of a text."""
        body: Json = {"delta": {}} if self._kind == "chat" else {"text": ""}
        event = self._event(index, body, None)
        event["choices"][0] |= {"finish_reason": result.finish_reason, "seed": result.seed}
        return event

    def total(self, results: Sequence[GenerationResult]) -> Json:
        """The event with `usage`."""
        return {**self._head(stream=True), "choices": [], "usage": self.usage(results)}

    def usage(self, results: Sequence[GenerationResult]) -> Json:
        """Tokens, each prompt counted once, and speculation statistics of all texts."""
        prompt, stats = sum(self._prompts), Stats()
        for result in results:
            stats.merge(result.stats)
        completion = sum(result.usage.completion_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "speculation": stats.summary(),
        }

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
            "pieces": chunk.pieces,
            "proposed_by": chunk.proposed_by,
            "tree": tree,
        }

    def _head(self, *, stream: bool) -> Json:
        return {
            "id": self._id,
            "object": _OBJECTS[self._kind, stream],
            "created": self._created,
            "model": self._name,
            "system_fingerprint": self._fingerprint,
        }

    def _event(self, index: int, body: Json, logprobs: Json | None) -> Json:
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": None}
        return {**self._head(stream=True), "choices": [choice]}

    def _delta(self, text: str, *, opening: bool = False) -> Json:
        if self._kind == "completion":
            return {"text": text}
        role = {"role": "assistant"} if opening else {}
        return {"delta": {**role, "content": text}}

    def _echo(self, index: int, texts: int) -> str:
        return self._echoes[index * len(self._prompts) // texts]

    def _logprobs(self, index: int, chunk: Chunk) -> Json:
        """Log-probabilities of a chunk, with its text offsets."""
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(chunk.text)
        if not chunk.logprobs or self._codec is None:
            return {}
        if self._kind == "chat":
            return _chat_logprobs(chunk, self._codec)
        return _completion_logprobs(chunk, self._codec, offset)


def _chat_logprobs(chunk: Chunk, codec: TextCodec) -> Json:
    def entry(token: int, logprob: float) -> Json:
        text, raw = codec.token_text(token), list(codec.token_bytes(token))
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {
            **entry(each.token_id, each.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in each.top],
        }
        for each in chunk.logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(chunk: Chunk, codec: TextCodec, offset: int) -> Json:
    def likeliest(each: TokenLogprob) -> dict[str, float]:
        # Among tokens with equal text, the likeliest one is kept.
        return {codec.token_text(token): logprob for token, logprob in reversed(each.top)}

    offsets = []
    for piece in chunk.pieces:
        offsets.append(offset)
        offset += len(piece)
    has_top = any(each.top for each in chunk.logprobs)
    return {
        "tokens": [codec.token_text(each.token_id) for each in chunk.logprobs],
        "token_logprobs": [each.logprob for each in chunk.logprobs],
        "top_logprobs": [likeliest(each) for each in chunk.logprobs] if has_top else None,
        "text_offset": offsets[: len(chunk.logprobs)],
    }


def _joined(parts: Sequence[Json]) -> Json:
    """Log-probabilities of consecutive chunks as one."""
    joined: Json = {}
    for part in parts:
        for key, value in part.items():
            joined[key] = joined[key] + value if isinstance(joined.get(key), list) else value
    return joined
