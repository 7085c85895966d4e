"""What the verifier serves, asked once and kept fresh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from paceline.v1 import verifier_pb2

from ._errors import InvalidRequestError, UnavailableError
from ._options import RetryOptions
from ._retry import Attempts
from ._text import TextCodec
from ._tokenizer import TokenizerCache
from ._transport import Transport

# A verifier cannot be replaced by one with another model faster than this. Unit: seconds.
_FRESH_FOR = 0.5
# Longer prompts are tokenised in a thread, so that other generations go on. Unit: characters.
_LONG_PROMPT = 20_000


@dataclass(frozen=True)
class Model:
    """The served model and its tokenizer."""

    facts: verifier_pb2.GetModelResponse
    """As the verifier told, without the tokenizer's bytes."""
    codec: TextCodec | None
    """None if the model folder has no tokenizer: then only token ids go in and out."""

    async def encode(self, prompt: str) -> list[int]:
        """Token ids of a text prompt. Raises InvalidRequestError without a tokenizer."""
        bos = self.facts.bos_token_id if self.facts.HasField("bos_token_id") else None
        return await self._encode(prompt, lambda codec: codec.encode(prompt, bos))

    async def encode_rendered(self, prompt: str) -> list[int]:
        """The same for the output of a chat template, which holds its special tokens already."""
        return await self._encode(prompt, lambda codec: codec.encode_rendered(prompt))

    async def _encode(self, prompt: str, encode: Callable[[TextCodec], list[int]]) -> list[int]:
        if self.codec is None:
            raise InvalidRequestError(
                f"{self.facts.name} is served without a tokenizer: give the prompt as token ids"
            )
        if len(prompt) > _LONG_PROMPT:
            return await asyncio.to_thread(encode, self.codec)
        return encode(self.codec)


class ModelSource:
    """Serves `Model` to many generations with one call, and notices when it changed."""

    def __init__(
        self, transport: Transport, tokenizers: TokenizerCache, retry: RetryOptions
    ) -> None:
        self._transport = transport
        self._tokenizers = tokenizers
        self._retry = retry
        self._lock = asyncio.Lock()
        self._model: Model | None = None
        self._asked_at = 0.0

    async def get(self) -> Model:
        """The model as it is now. Raises UnavailableError when the retry budget is spent."""
        if self._model is not None and monotonic() - self._asked_at < _FRESH_FOR:
            return self._model
        async with self._lock:
            if self._model is None or monotonic() - self._asked_at >= _FRESH_FOR:
                self._model = await self._ask(self._model)
                self._asked_at = monotonic()
            return self._model

    async def _ask(self, known: Model | None) -> Model:
        digest = known.facts.tokenizer_digest if known else ""
        facts = await self._call(digest)
        if known is not None and facts.tokenizer_digest == digest:
            return Model(_without_tokenizer(facts), known.codec)
        return Model(_without_tokenizer(facts), await self._codec(facts))

    async def _codec(self, facts: verifier_pb2.GetModelResponse) -> TextCodec | None:
        digest = facts.tokenizer_digest
        if not digest:
            return None
        codec = await asyncio.to_thread(self._tokenizers.find, digest)
        if codec is None:
            if not facts.tokenizer_gzip:
                facts = await self._call("", with_tokenizer=True)
            codec = await asyncio.to_thread(
                self._tokenizers.add, facts.tokenizer_digest, facts.tokenizer_gzip
            )
        return codec

    async def _call(
        self, known_digest: str, *, with_tokenizer: bool = False
    ) -> verifier_pb2.GetModelResponse:
        request = verifier_pb2.GetModelRequest(
            known_tokenizer_digest=known_digest, omit_tokenizer=not with_tokenizer
        )
        attempts = Attempts(self._retry)
        while True:
            try:
                return await self._transport.get_model(request)
            except UnavailableError as error:
                await attempts.pause(error)


def _without_tokenizer(facts: verifier_pb2.GetModelResponse) -> verifier_pb2.GetModelResponse:
    slim = verifier_pb2.GetModelResponse()
    slim.CopyFrom(facts)
    slim.ClearField("tokenizer_gzip")
    return slim
