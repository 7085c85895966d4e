"""`/tokenize` and `/detokenize`, in the forms of vLLM and of llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.client import Model

from .body import Body
from .errors import bad_request
from .messages import Message
from .requests import ChatRequest
from .tools import Tool


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, `prompt` (llama.cpp: `content`), or `messages` of a chat."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True
    """Add the special tokens of a prompt to `prompt`."""
    add_special: bool = False
    """The same for `content`."""
    return_token_strs: bool = False
    """Also return the text of each token."""
    with_pieces: bool = False
    """Return each token as an object with `id` and `piece`."""
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] = Field(default=[])
    chat_template_kwargs: dict[str, Any] = Field(default={})
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeRequest:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("send one of prompt, content and messages")
        return self

    def chat(self) -> ChatRequest | None:
        """The conversation, if it is one."""
        if self.messages is None:
            return None
        return ChatRequest(
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**32)]]


async def tokens_of(body: TokenizeRequest, model: Model) -> list[int]:
    """Token ids of a text."""
    text, special = body.prompt, body.add_special_tokens
    if text is None:
        text, special = body.content or "", body.add_special
    return await (model.encode(text) if special else model.encode_rendered(text))


def described(body: TokenizeRequest, model: Model, tokens: list[int]) -> dict[str, Any]:
    """The response to `/tokenize`."""
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": model.facts.max_context,
        "tokens": tokens,
    }
    pieces = [model.codec.token_text(token) for token in tokens] if model.codec is not None else []
    if body.return_token_strs:
        answer["token_strs"] = pieces
    if body.with_pieces:
        both = zip(tokens, pieces, strict=True)
        answer["tokens"] = [{"id": token, "piece": piece} for token, piece in both]
    return answer


def text_of(body: DetokenizeRequest, model: Model) -> dict[str, Any]:
    """The response to `/detokenize`."""
    if model.codec is None:
        raise bad_request(f"{model.facts.name} is served without a tokenizer", "tokens")
    text = model.codec.decode(body.tokens)
    return {"prompt": text, "content": text}
