"""Messages of a conversation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .body import Body


class ContentPart(Body):
    """A part of a message; only text is supported."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class FunctionCall(Body):
    """A function and its arguments, JSON as text."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call that the model made earlier."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a conversation, such as one of this gateway's own answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default=[])
    tool_call_id: str | None = None
    # Of OpenAI's answers, and without a place in a template.
    refusal: str | None = None
    annotations: list[Any] = Field(default=[])

    @property
    def text(self) -> str:
        """All of its text."""
        if isinstance(self.content, str):
            return self.content or self.refusal or ""
        return "\n".join(part.text or part.refusal for part in self.content)
