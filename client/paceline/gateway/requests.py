"""The requests of `/v1/completions` and `/v1/chat/completions`.

OpenAI's fields, those of vLLM and llama.cpp that mean something here, and Paceline's own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .body import Body
from .constraints import Constrained
from .errors import bad_request
from .messages import Message
from .tools import Tool, ToolUse

MAX_PROMPTS = 1024
"""Most prompts of one request."""
MAX_CHOICES = 64
"""Most choices of one prompt."""

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Token = Annotated[int, Field(ge=0, lt=2**32)]
_TokenText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_StopText = Annotated[str, Field(min_length=1)]


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: bool = False
    """End with an event that has `usage` and no choices."""
    include_rounds: bool = False
    """Add the round with its tree and the proposer of each piece to each event."""
    # A field of OpenAI's against measuring the length of tokens; there is no padding here.
    include_obfuscation: bool = False


class GenerationRequest(Constrained):
    """Fields of both kinds of request."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: dict[_TokenText, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: _StopText | Annotated[list[_StopText], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    # Extensions, with the names of other servers.
    top_k: int = Field(default=0, ge=-1, lt=2**32)
    """0 and -1 keep all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    stop_token_ids: Annotated[list[_Token], Field(max_length=1024)] = Field(default=[])
    ignore_eos: bool = False
    drafter: str | None = None
    """Name of a drafter; "none" turns speculation off. The text does not depend on it."""

    # Accepted and unused: many programs always send them, and no text depends on them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self, choice: int) -> dict[str, Any]:
        """Sampling arguments of `Client.generate` for one of the n choices.

        Choice i has the seed of the request plus i, so that the first equals the only one of a
        request with n=1.
        """
        names = (
            *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "stop_token_ids", "ignore_eos", "drafter"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "top_k": max(0, self.top_k),
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "seed": None if self.seed is None else (self.seed + choice) % 2**64,
            "stop": self.stop or (),
            **self.constraint(),
        }


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[_Token], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    max_tokens: int = Field(default=16, ge=0, lt=2**31)
    """0 with `echo` returns the prompt, and with `logprobs` its log-probabilities."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        """Each prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """More variables of the chat template."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""
    continue_final_message: bool = False
    """End the prompt with the text of the last message, which the answer continues."""

    def tool_use(self) -> ToolUse:
        """Its tools and how they may be called.

        Raises:
            ApiError: A tool that must be called does not exist.
        """
        choice = self.tool_choice
        if isinstance(choice, Tool):
            name = choice.function.name
            if name not in (tool.function.name for tool in self.tools):
                raise bad_request(f"tools has no function {name!r}", "tool_choice")
            return ToolUse(self.tools, "named", self.parallel_tool_calls, name)
        if choice == "required" and not self.tools:
            raise bad_request("tool_choice 'required' needs tools", "tool_choice")
        if choice == "none" or not self.tools:
            return ToolUse([], "none")
        return ToolUse(self.tools, choice, self.parallel_tool_calls)

    def constraint(self) -> dict[str, Any]:
        """The constraint of the text, that of the tools included."""
        own, schema = super().constraint(), self.tool_use().schema()
        if own and schema is not None:
            raise bad_request(
                "a call that tool_choice requires leaves no room for a constrained text: send "
                "either",
                "tool_choice",
            )
        return own if schema is None else {"json_schema": schema}
