"""What requests may hold: OpenAI's fields, checked, and Paceline's own beside them.

A field that is not here is refused rather than ignored. So is a known one that asks for something
that is not built, such as tools.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 64
"""Most texts of one request: prompts times n."""

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Token = Annotated[int, Field(ge=0, lt=2**32)]
_StopText = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """What a stream tells besides the text."""

    include_usage: bool = False
    """A last event with `usage` and no choices."""
    include_rounds: bool = False
    """In each event: who proposed which piece, and the tree of the round. Paceline's own."""


class FreeText(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObject(_Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Strict):
    """A JSON schema. It is always followed to the letter: `strict` says so or nothing."""

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
    """What both kinds of request have in common."""

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

    # Paceline's own, named as other servers name theirs.
    top_k: int = Field(0, ge=0, lt=2**32)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    stop_token_ids: Annotated[list[_Token], Field(max_length=1024)] = []
    ignore_eos: bool = False
    drafter: str | None = None
    """Name of a drafter; "none" turns speculation off. The text is the same either way."""

    # Notes for billing and caching that change nothing here: many programs send them always.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    def sampling(self, choice: int) -> dict[str, Any]:
        """Arguments of `Client.generate` that decide the tokens of one of the n choices.

        Choice i of a request with a seed has the seed plus i: the first is what a request for one
        text gets.
        """
        seed = None if self.seed is None else (self.seed + choice) % 2**64
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "seed": seed,
            "json_schema": self._schema(),
            "stop": self.stop or (),
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "drafter": self.drafter,
        }

    def _schema(self) -> dict[str, Any] | None:
        """What the text must be an instance of."""
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
    """A part of a message; only text is understood."""

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
    """Further variables of the chat template. Paceline's own."""
