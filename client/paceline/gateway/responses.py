"""The requests of `/v1/responses`: a conversation in OpenAI's newer form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from .body import Body
from .errors import bad_request, from_validation
from .requests import ChatRequest


class InputPart(Body):
    """A part of a message; only text is supported."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str = ""


class InputMessage(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    # Of the API's answers.
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The message of a chat."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        content = "\n".join(part.text or part.refusal for part in self.content)
        return {"role": self.role, "content": content}


class InputCall(Body):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The message of a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


class InputResult(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The message of a chat."""
        output = self.output
        if not isinstance(output, str):
            output = "\n".join(part.text for part in output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": output}


class InputReasoning(Body):
    """Reasoning of an earlier answer; it is left out."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] = Field(default=[])
    content: list[Any] = Field(default=[])
    status: str | None = None
    encrypted_content: str | None = None


Item = InputMessage | InputCall | InputResult | InputReasoning
_KINDS: dict[str, type[Item]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputResult,
    "reasoning": InputReasoning,
}


class TextFormat(Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None


class FunctionTool(Body):
    """A function, not nested as in a chat."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """A function to be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(Body):
    """`POST /v1/responses`. Nothing is stored: a conversation is sent whole."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    background: bool = False

    # Extensions, as in a chat.
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    drafter: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})

    # Accepted and unused, as in a chat.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    truncation: Literal["disabled"] | None = None
    include: list[str] = Field(default=[])
    stream_options: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The same request as a chat.

        Raises:
            ApiError: It needs stored responses, or is invalid as a chat.
        """
        if self.previous_response_id is not None or self.background:
            name = "background" if self.background else "previous_response_id"
            raise bad_request(f"{name} needs stored responses: send the whole conversation", name)
        same = (
            *("model", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "seed"),
            *("top_k", "min_p", "repetition_penalty", "drafter", "chat_template_kwargs"),
        )
        fields = {name: getattr(self, name) for name in same}
        if isinstance(self.tool_choice, NamedFunction):
            fields["tool_choice"] = {"function": {"name": self.tool_choice.name}}
        form = self.text.format
        if form.type == "json_schema":
            if form.schema_ is None:
                raise bad_request("text.format needs a schema", "text.format.schema")
            named = {"name": form.name, "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        elif form.type == "json_object":
            fields["response_format"] = {"type": "json_object"}
        fields["tools"] = [
            {"function": tool.model_dump(include={"name", "description", "parameters", "strict"})}
            for tool in self.tools
        ]
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error) from None

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, fields in enumerate(self.input):
            item = _item(index, fields)
            if isinstance(item, InputReasoning):
                continue
            message = item.as_message()
            if message["role"] == "assistant" and messages and "tool_calls" in message:
                last = messages[-1]
                if last["role"] == "assistant":  # calls of one answer are one message
                    last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
                    continue
            messages.append(message)
        return messages


def _item(index: int, fields: dict[str, Any]) -> Item:
    kind = "message" if fields.get("type") is None else fields["type"]
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise bad_request(f"an item of type {kind!r} is unknown; known are {known}", "input")
    try:
        return _KINDS[kind].model_validate(fields)
    except ValidationError as error:
        failure = from_validation(error)
        failure.param = f"input.{index}.{failure.param or ''}".rstrip(".")
        raise failure from None
