"""Generations as OpenAI's JSON. Fields that OpenAI does not have: `seed` of a choice, and
`speculation` in usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
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
    """Writes the answer to one request: whole, or an event at a time.

    Args:
        kind: which of the two interfaces.
        name: what the request calls the model.
        model: what is served.
        prompts: number of tokens of each prompt.
        echoes: text to put before the texts of each prompt; empty strings: none.
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
        """The answer in one piece."""
        results = [result for _, result in texts]
        choices = []
        for index, (chunks, result) in enumerate(texts):
            text = self._echo(index, len(texts)) + result.text
            noted = [self._note(index, chunk) for chunk in chunks]
            body: Json = {"text": text}
            if self._kind == "chat":
                body = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(
                {
                    "index": index,
                    **body,
                    "logprobs": _joined(noted) or None,
                    "finish_reason": result.finish_reason,
                    "seed": result.seed,
                }
            )
        return {**self._head(stream=False), "choices": choices, "usage": self.usage(results)}

    def opening(self, index: int, texts: int) -> Json:
        """The first event of a text: the role in a chat, an echo of the prompt elsewhere."""
        text = self._echo(index, texts)
        return self._event(index, self._delta(text, opening=True), None)

    def chunk(self, index: int, chunk: Chunk, *, rounds: bool) -> Json:
        """An event with more of a text; with `rounds` also how it came about."""
        noted = self._note(index, chunk)
        event = self._event(index, self._delta(chunk.text), noted or None)
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
        """Tokens, each prompt counted once, and what speculation did, over all texts."""
        prompt = sum(self._prompts)
        completion = sum(result.usage.completion_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "speculation": _together(result.stats for result in results).summary(),
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

    def _note(self, index: int, chunk: Chunk) -> Json:
        """Log-probabilities of a chunk; keeps count of the characters before it."""
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
        # Several tokens may read alike: the likeliest of them counts.
        return {codec.token_text(token): logprob for token, logprob in reversed(each.top)}

    offsets = []
    for piece in chunk.pieces:
        offsets.append(offset)
        offset += len(piece)
    asked = any(each.top for each in chunk.logprobs)
    return {
        "tokens": [codec.token_text(each.token_id) for each in chunk.logprobs],
        "token_logprobs": [each.logprob for each in chunk.logprobs],
        "top_logprobs": [likeliest(each) for each in chunk.logprobs] if asked else None,
        "text_offset": offsets[: len(chunk.logprobs)],
    }


def _joined(parts: Sequence[Json]) -> Json:
    """Log-probabilities of consecutive chunks as one."""
    joined: Json = {}
    for part in parts:
        for key, value in part.items():
            joined[key] = joined[key] + value if isinstance(joined.get(key), list) else value
    return joined


def _together(parts: Iterable[Stats]) -> Stats:
    """The figures of several generations as one's; times are sums."""
    total = Stats()
    for part in parts:
        for entry in part.rounds:
            total.add(entry)
        total.fallbacks.update(part.fallbacks)
        total.drafter_versions.extend(
            version for version in part.drafter_versions if version not in total.drafter_versions
        )
        total.prefill_ms += part.prefill_ms
        total.first_token_ms += part.first_token_ms
        total.total_ms += part.total_ms
        if part.batch_invariant is not None:
            total.batch_invariant = part.batch_invariant and total.batch_invariant is not False
    return total
