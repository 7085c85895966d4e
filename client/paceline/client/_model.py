"""The served model and its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from paceline.v1 import verifier_pb2

from ._errors import InvalidRequestError
from ._options import RetryOptions
from ._retry import Attempts, retry_unavailable
from ._text import TextCodec
from ._tokenizer import TokenizerCache
from ._transport import Transport

# The model is requested again after this time: a restart with another one takes longer. Unit: s.
_MAX_AGE = 0.5
# Longer prompts are tokenised in a thread, to keep the event loop free. Unit: characters.
_LONG_PROMPT = 20_000


@dataclass(frozen=True)
class Model:
    """The served model and its tokenizer."""

    facts: verifier_pb2.GetModelResponse
    """Response of the verifier, without the tokenizer's content."""
    codec: TextCodec | None
    """The tokenizer. None if the model has none: then prompts and results are token ids."""

    async def encode(self, prompt: str) -> list[int]:
        """Token ids of a text prompt. Raises InvalidRequestError without a tokenizer."""
        bos = self.facts.bos_token_id if self.facts.HasField("bos_token_id") else None
        return await self._encode(prompt, lambda codec: codec.encode(prompt, bos))

    async def encode_rendered(self, prompt: str) -> list[int]:
        """Token ids of a chat template's output, which contains its special tokens."""
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
    """The current `Model`, requested once for all generations and refreshed."""

    def __init__(
        self, transport: Transport, tokenizers: TokenizerCache, retry: RetryOptions
    ) -> None:
        self._transport = transport
        self._tokenizers = tokenizers
        self._retry = retry
        self._lock = asyncio.Lock()
        self._model: Model | None = None
        self._requested_at = 0.0

    async def get(self) -> Model:
        """The current model. Raises UnavailableError when the retry budget is spent."""
        async with self._lock:
            if self._model is None or monotonic() - self._requested_at >= _MAX_AGE:
                self._model = await self._request(self._model)
                self._requested_at = monotonic()
            return self._model

    async def _request(self, known: Model | None) -> Model:
        facts = await self._call(omit_tokenizer=True)
        if known is not None and facts.tokenizer_digest == known.facts.tokenizer_digest:
            return Model(facts, known.codec)
        return Model(facts, await self._codec(facts.tokenizer_digest))

    async def _codec(self, digest: str) -> TextCodec | None:
        if not digest:
            return None
        codec = await asyncio.to_thread(self._tokenizers.find, digest)
        if codec is None:
            facts = await self._call(omit_tokenizer=False)
            codec = await asyncio.to_thread(
                self._tokenizers.add, facts.tokenizer_digest, facts.tokenizer_gzip
            )
        return codec

    async def _call(self, *, omit_tokenizer: bool) -> verifier_pb2.GetModelResponse:
        request = verifier_pb2.GetModelRequest(omit_tokenizer=omit_tokenizer)
        return await retry_unavailable(
            lambda: self._transport.get_model(request), Attempts(self._retry)
        )
