"""`/v1/messages`: a conversation in Anthropic's form, and its answer, whole or as events."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from paceline.client import GenerationResult, TokenLogprob

from .bodies import Body
from .errors import ApiError
from .generation import GenerationJob
from .requests import (
    ChatRequest,
    CommonRequest,
    Items,
    Limit,
    OtherTool,
    Stops,
    TextPart,
    ToolUse,
    chat_of,
    kind_of,
    text_of,
)
from .tool_calls import Call, Part, Reasoning
from .writers import Json, PartsWriter, told, usage

PATH = "/v1/messages"
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Types of errors by status; others are invalid requests."""
_TOO_LONG = "prompt is too long: "  # the words by which programs know that they have to shorten it

# What Claude Code begins its instructions with. It differs in each request, so that no cached KV
# would fit.
_COUNTED = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_SESSION = re.compile(r"_session_[\w-]+$")
# Clients keep a thought only if it is signed. The text is not checked when it comes back.
_SIGNATURE = "unsigned"

_BLOCKS = {
    "thinking": "Thinking", "redacted_thinking": "Thinking", "tool_use": "Call",
    "tool_result": "Result",
}  # fmt: skip


class _Cached(Body):
    """What a part of a prompt may say about caching, which needs no request here."""

    cache_control: Any = None


class TextBlock(_Cached, TextPart):
    type: Literal["text"]


class ThinkingBlock(Body):
    """What the model thought; the text of a redacted one is known to Anthropic's service only."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""


class CallBlock(_Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ResultBlock(_Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] = ""
    is_error: bool = False  # the content says it too


def _kind_of_block(block: Any) -> str:
    return _BLOCKS.get(kind_of(block) or "", "Text")


_Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[CallBlock, Tag("Call")]
    | Annotated[ResultBlock, Tag("Result")],
    Discriminator(_kind_of_block),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[_Block]

    def as_messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat: results, each a message of its own, and the rest."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
            for block in self.content
            if isinstance(block, ResultBlock)
        ]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if isinstance(block, CallBlock)
        ]
        if results and not (texts or calls):
            return results
        rest: dict[str, Any] = {"role": self.role, "content": text_of(texts)}
        rest |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        return [*results, rest | ({"tool_calls": calls} if calls else {})]


class MessagesTool(_Cached):
    """A function. Other tools are left out, with a warning."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _kind_of_tool(tool: Any) -> str:
    return "Function" if kind_of(tool) in (None, "custom") else "Other"


_Tool = Annotated[
    Annotated[MessagesTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
    Discriminator(_kind_of_tool),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""  # of type "tool"
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: str = "adaptive"
    budget_tokens: Limit | None = None
    display: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(CommonRequest, _Cached):
    """`POST /v1/messages`, and `/v1/messages/count_tokens`."""

    messages: Annotated[Items[Turn], Field(min_length=1)]
    system: str | Items[TextBlock] = ""
    max_tokens: Limit | None = None
    stop_sequences: Stops = Field(default=[])
    tools: Items[_Tool] = Field(default=[])
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = Field(default={})  # as in a chat

    def chat(self) -> ChatRequest:
        """Return the same request as a chat. Raises ApiError if it is invalid as a chat."""
        same = MessagesRequest.model_fields.keys() & ChatRequest.model_fields.keys()
        fields = {name: getattr(self, name) for name in same}
        system = _COUNTED.sub("", text_of(self.system), count=1)
        first = [{"role": "system", "content": system}] if system else []
        fields["messages"] = [*first, *(m for turn in self.messages for m in turn.as_messages())]
        last = fields["messages"][-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        choice = self.tool_choice
        fields["tools"] = list(map(_as_function, self.tools))
        fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
        if choice.type == "tool":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        fields["stop"] = self.stop_sequences or None
        fields["user"] = _user((self.metadata or {}).get("user_id")) or self.user
        fields["reasoning_effort"] = self.output_config.effort
        if (form := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            thinks = {"enable_thinking": self.thinking.type == "enabled"}
            fields["chat_template_kwargs"] = thinks | self.chat_template_kwargs
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        return chat_of(fields)


def _user(user_id: Any) -> str:
    """Return the user in all sessions: Claude Code names the session too, which would keep the KV
    of its instructions from the next one."""
    if not isinstance(user_id, str):
        return ""
    try:
        facts = json.loads(user_id)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        return _SESSION.sub("", user_id)
    return json.dumps({name: facts[name] for name in sorted(facts) if name != "session_id"})


def _as_function(tool: MessagesTool | OtherTool) -> dict[str, Any]:
    """Return a tool in the form of a chat."""
    if isinstance(tool, OtherTool):
        return {"type": tool.type}
    names = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**names, "parameters": tool.input_schema}}


def error_body(error: ApiError) -> Json:
    """Return an error in Anthropic's form, which is an event too."""
    message = error.body["error"]["message"]
    if error.code == "context_length_exceeded":
        message = _TOO_LONG + message
    kind = _ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesWriter(PartsWriter):
    """Formats one answer: blocks that are a text, a thought or a call."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, job: GenerationJob, use: ToolUse) -> None:
        super().__init__(job, use)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[Json] = []

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """Return the message without content."""
        return [{"type": "message_start", "message": self._body(None)}, {"type": "ping"}]

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """Return the end of the last block, and what is known of the whole message."""
        events = self._write(self._answer.flush()) + self._close()
        message = self._body(result)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        last |= told(self._job, result)
        return [*events, last, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> list[Json]:
        return [error_body(error)]

    def _write(self, parts: Sequence[Part]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            if isinstance(part, Call):
                events += self._close()
                events += self._begin("tool_use", id=part.id, name=part.name, input={})
                given = self._blocks[-1]["input"] = part.values
                events.append(self._delta("input_json_delta", partial_json=json.dumps(given)))
                events += self._close()
                continue
            kind = "thinking" if isinstance(part, Reasoning) else "text"
            text = part.text if isinstance(part, Reasoning) else part
            if self._open != kind:
                signed = {"signature": ""} if kind == "thinking" else {}
                events += self._close() + self._begin(kind, **{kind: ""}, **signed)
            self._blocks[-1][kind] += text
            events.append(self._delta(f"{kind}_delta", **{kind: text}))
        return events

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        self._open = kind
        self._blocks.append({"type": kind, **fields})
        return [self._event("start", content_block=dict(self._blocks[-1]))]

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        events = [self._event("stop")]
        if self._open == "thinking":
            self._blocks[-1]["signature"] = _SIGNATURE
            events.insert(0, self._delta("signature_delta", signature=_SIGNATURE))
        self._open = ""
        return events

    def _delta(self, kind: str, **fields: Any) -> Json:
        return self._event("delta", delta={"type": kind, **fields})

    def _event(self, what: str, **fields: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self._blocks) - 1, **fields}

    def _body(self, result: GenerationResult | None) -> Json:
        counted = usage(self._job, [result] if result else [])
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model_name,
            "content": list(self._blocks),
            "stop_reason": result and self._reason(result),
            "stop_sequence": result and result.stop_string,
            "usage": {
                "input_tokens": counted["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"thinking_tokens": self._answer.reasoning_tokens},
                **({"speculation": counted["speculation"]} if result else {}),
            },
            **(told(self._job, result) if result else {}),
        }

    def _reason(self, result: GenerationResult) -> str:
        if result.finish_reason == "length":
            return "max_tokens"
        if self._answer.calls:
            return "tool_use"
        return "end_turn" if result.stop_string is None else "stop_sequence"
