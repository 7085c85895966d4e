"""The request schema: OpenAI's fields and those of Paceline.

Other fields are refused rather than ignored, such as those for tools.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ApiError, from_validation

MAX_CHOICES = 64
"""Most texts of one request: prompts times n."""

# Longest time for the arrival of a request's body. Unit: seconds.
_BODY_TIMEOUT = 30.0

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Token = Annotated[int, Field(ge=0, lt=2**32)]
_StopText = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """Additional content of a stream."""

    include_usage: bool = False
    """End with an event that has `usage` and no choices."""
    include_rounds: bool = False
    """Add the round with its tree and the proposer of each piece to each event."""


class FreeText(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObject(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Strict):
    """A JSON schema. It is always enforced, whatever `strict` is."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchema(_Strict):
    """JSON that is an instance of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[FreeText | JsonObject | JsonSchema, Field(discriminator="type")]


class _Generation(_Strict):
    """Fields of both kinds of request."""

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: dict[_Token, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    response_format: ResponseFormat = FreeText(type="text")
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Extensions, with the names of other servers.
    top_k: int = Field(0, ge=0, lt=2**32)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    stop_token_ids: Annotated[list[_Token], Field(max_length=1024)] = []
    ignore_eos: bool = False
    drafter: str | None = None
    """Name of a drafter; "none" turns speculation off. The text does not depend on it."""

    # Accepted and unused: many programs always send them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    def sampling(self, choice: int) -> dict[str, Any]:
        """Sampling arguments of `Client.generate` for one of the n choices.

        Choice i has the seed of the request plus i, so that the first equals the only one of a
        request with n=1.
        """
        names = (
            *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "drafter"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "seed": None if self.seed is None else (self.seed + choice) % 2**64,
            "json_schema": self._schema(),
            "stop": self.stop or (),
        }

    def _schema(self) -> dict[str, Any] | None:
        """The JSON schema of the text."""
        if isinstance(self.response_format, JsonSchema):
            return self.response_format.json_schema.schema_
        return {"type": "object"} if isinstance(self.response_format, JsonObject) else None


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[list[_Token]], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: int | None = Field(16, ge=1, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        """Each prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ContentPart(_Strict):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}
    """More variables of the chat template."""


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


async def read_request(request: web.Request, kind: type[AnyRequest]) -> AnyRequest:
    """Reads and validates a request.

    The content type must be JSON, which pages of other sites cannot send without CORS.

    Raises:
        ApiError: The body is not a request of this kind, or does not arrive in time.
    """
    if request.content_type != "application/json":
        raise ApiError(415, "send the request as application/json")
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            return kind.model_validate_json(await request.read())
    except TimeoutError:
        raise ApiError(408, "the request's body took too long", code="timeout") from None
    except ValidationError as error:
        raise from_validation(error) from None
