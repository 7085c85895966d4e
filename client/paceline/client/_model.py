"""The served model and its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from paceline.v1 import verifier_pb2

from ._errors import InvalidRequestError
from ._text import TextCodec

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
