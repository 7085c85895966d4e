"""`/v1/responses`: a conversation in OpenAI's newer form, and its response, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from paceline.client import Chunk, GenerationResult, InvalidRequestError, TokenLogprob

from .channels import parser_of
from .errors import ApiError, bad_request, from_validation
from .generation import GenerationJob
from .requests import Body, ChatRequest, CommonRequest, Items, TextPart, ToolUse, text_of
from .tool_calls import Call, Part, Reasoning
from .writers import GeneratedText, Json, Writer, usage

_PARAMS = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
"""Fields of a response by those of a chat."""


class InputPart(TextPart):
    """A part of a message, or of a result."""

    type: Literal["input_text", "output_text", "text", "refusal"]


class InputMessage(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[InputPart]

    def as_message(self) -> dict[str, Any]:
        return {"role": self.role, "content": text_of(self.content)}


class InputCall(Body):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


class InputResult(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[InputPart]

    def as_message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


_KINDS: dict[str, type[InputMessage | InputCall | InputResult]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputResult,
}
"""Items of a conversation that become messages. Reasoning of an earlier answer is a field of the
next message. Other fields of items, such as their status, are left out."""


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


class ResponsesRequest(CommonRequest):
    """`POST /v1/responses`. Nothing is stored: a conversation is sent whole."""

    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    text: TextOptions = TextOptions()
    tools: Items[FunctionTool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    background: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """As in a chat."""

    # Accepted and unused.
    truncation: Literal["disabled"] | None = None
    include: Items[str] = Field(default=[])
    stream_options: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The same request as a chat. Raises ApiError: it needs stored responses, or is invalid as
        a chat."""
        if self.previous_response_id is not None or self.background:
            name = "background" if self.background else "previous_response_id"
            raise bad_request(f"{name} needs stored responses: send the whole conversation", name)
        same = ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys()
        fields = {name: getattr(self, name) for name in same - {"stream_options"}}
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
        thoughts = ""
        for index, fields in enumerate(self.input):
            kind = "message" if fields.get("type") is None else fields["type"]
            if kind == "reasoning":
                thoughts += _thoughts(fields)
                continue
            message = _message(index, kind, fields)
            if thoughts and message["role"] == "assistant":
                message["reasoning_content"], thoughts = thoughts, ""
            if message["role"] == "assistant" and messages and "tool_calls" in message:
                last = messages[-1]
                if last["role"] == "assistant":  # calls of one answer are one message
                    last.setdefault("tool_calls", []).extend(message["tool_calls"])
                    continue
            messages.append(message)
        return messages


def _thoughts(fields: dict[str, Any]) -> str:
    """The text of a reasoning item; empty where it has a summary or encrypted content alone."""
    parts = fields.get("content")
    listed = parts if isinstance(parts, list) else []
    texts = [part.get("text") for part in listed if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _message(index: int, kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The message of an item in a chat."""
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join((*_KINDS, "reasoning"))
        raise bad_request(f"an item of type {kind!r} is unknown; known are {known}", "input")
    try:
        return _KINDS[kind].model_validate(fields).as_message()
    except ValidationError as error:
        failure = from_validation(error)
        place = f"input.{index}"
        failure.param = f"{place}.{failure.param}" if failure.param else place
        failure.message = f"{place}.{failure.message}"
        raise failure from None


@contextmanager
def errors_of_response() -> Iterator[None]:
    """Lets errors of the chat that a response becomes name the fields of the response."""
    try:
        yield
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise
    except InvalidRequestError as error:
        if (param := error.metadata.get("param", "")) in _PARAMS:
            error.metadata = {**error.metadata, "param": _PARAMS[param]}
        raise


class ResponsesWriter(Writer):
    """Formats one response: items that are a message or a call, and some fields of the request."""

    def __init__(self, job: GenerationJob, use: ToolUse, body: ResponsesRequest) -> None:
        self._job = job
        self._body = body
        self._parser = parser_of(use, job.marks, job.in_thought)
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._output: list[Json] = []
        self._open = ""  # type of the item that is not complete
        self._events = 0

    def whole(self, texts: Sequence[GeneratedText]) -> Json:
        (text,) = texts
        assert text.result is not None
        self._write(self._parser.push(text.result.text))
        self._write(self._parser.flush())
        self._close()
        return self._response(text.result)

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """The response without output."""
        return [
            self._event(f"response.{state}", response=self._response(None))
            for state in ("created", "in_progress")
        ]

    def chunks(self, index: int, chunks: Sequence[Chunk]) -> list[Json]:
        return self._write(self._parser.push("".join(chunk.text for chunk in chunks)))

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """The end of the last item, and the whole response."""
        events = self._write(self._parser.flush())
        if not self._output:
            events += self._begin("message")
        events += self._close()
        response = self._response(result)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def total(self, results: Sequence[GenerationResult]) -> list[Json]:
        return []  # the last event has the usage

    def _write(self, parts: Sequence[Part]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            if isinstance(part, Call):
                events += self._close() + self._call(part)
                continue
            kind = "reasoning" if isinstance(part, Reasoning) else "message"
            text = part.text if isinstance(part, Reasoning) else part
            if self._open != kind:
                events += self._close() + self._begin(kind)
            self._output[-1]["content"][0]["text"] += text
            events.append(self._text_event("delta", delta=text))
        return events

    def _begin(self, kind: str) -> list[Json]:
        """Begins a message, or what the model thinks."""
        self._open = kind
        item: Json = {"id": "", "type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": _new_id("msg"), "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": []}
        else:
            item |= {"id": _new_id("rs"), "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._output.append(item)
        events = [self._item_event("added")]
        item["content"] = [part]
        return [*events, self._part_event("content_part.added", part=part)]

    def _text_event(self, what: str, **fields: object) -> Json:
        if self._open == "message":
            return self._part_event(f"output_text.{what}", **fields, logprobs=[])
        return self._part_event(f"reasoning_text.{what}", **fields)

    def _close(self) -> list[Json]:
        """Ends the open item."""
        if not self._open:
            return []
        item = self._output[-1]
        item["status"] = "completed"
        part = item["content"][0]
        done = self._text_event("done", text=part["text"])
        self._open = ""
        return [
            done,
            self._part_event("content_part.done", part=part),
            self._item_event("done"),
        ]

    def _call(self, call: Call) -> list[Json]:
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._output.append(item)
        events = [self._item_event("added")]
        item |= {"status": "completed", "arguments": call.arguments}
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        prefix = "response.function_call_arguments"
        return [
            *events,
            self._event(f"{prefix}.delta", **place, delta=call.arguments),
            self._event(f"{prefix}.done", **place, name=call.name, arguments=call.arguments),
            self._item_event("done"),
        ]

    def _item_event(self, what: str) -> Json:
        return self._event(
            f"response.output_item.{what}",
            output_index=len(self._output) - 1,
            item=dict(self._output[-1]),
        )

    def _part_event(self, what: str, **fields: object) -> Json:
        if "part" in fields:
            fields["part"] = dict(self._output[-1]["content"][0])
        return self._event(
            f"response.{what}",
            item_id=self._output[-1]["id"],
            output_index=len(self._output) - 1,
            content_index=0,
            **fields,
        )

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event

    def _response(self, result: GenerationResult | None) -> Json:
        body = self._body
        status, reason = "in_progress", None
        if result is not None:
            status = "incomplete" if result.finish_reason == "length" else "completed"
            reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        repeated = body.model_dump(
            include={
                *("instructions", "max_output_tokens", "temperature", "top_p", "tools"),
                *("tool_choice", "parallel_tool_calls", "metadata", "text"),
            },
            by_alias=True,
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._job.model_name,
            "output": [dict(item) for item in self._output],
            **repeated,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "store": False,
            "usage": None if result is None else self._usage(result),
            **({} if result is None else {"seed": result.seed}),
        }

    def _usage(self, result: GenerationResult) -> Json:
        counted = usage(self._job, [result])
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
            "speculation": counted["speculation"],
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
