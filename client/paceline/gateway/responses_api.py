"""`/v1/responses`: a conversation in OpenAI's newer form, and its response, whole or as events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from paceline.client import GenerationResult, InvalidRequestError, TokenLogprob

from .bodies import Body, Refused
from .errors import ApiError, bad_request, from_validation
from .generation import GenerationJob
from .requests import (
    AllowedTools,
    CallingRequest,
    ChatRequest,
    CommonRequest,
    InputFormat,
    Items,
    Limit,
    OrOtherTool,
    OtherTool,
    TextPart,
    ToolUse,
    chat_of,
    text_of,
)
from .tool_calls import Call, Part, Reasoning
from .writers import Json, PartsWriter, told, usage

_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}  # fields of a response by a chat's fields
_WITH_RESULT = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_call")
"""Calls that OpenAI's own service answers: an item has both."""
_CALLS = ("custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")
_OUTPUTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output")

_STORED = Refused("needs stored responses: send the whole conversation")


class InputPart(TextPart):
    type: Literal["input_text", "output_text", "text", "refusal"]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[InputPart]

    def as_messages(self) -> list[dict[str, Any]]:
        return [{"role": self.role, "content": text_of(self.content)}]


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    arguments: str

    def as_messages(self) -> list[dict[str, Any]]:
        return [_call(self.call_id, _full(self.namespace, self.name), self.arguments)]


class InputResult(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Items[InputPart]

    def as_messages(self) -> list[dict[str, Any]]:
        return [_result(self.call_id, text_of(self.output))]


class ToolsItem(Body):
    """Tools that are added to the request's."""

    type: Literal["additional_tools"]
    tools: list[Any]

    def as_messages(self) -> list[dict[str, Any]]:
        return []


class OtherItem(Body):
    """A call of a tool that is no function, its result, or both. For the model it is one of a
    function: the arguments are all fields that are not listed here."""

    type: str
    id: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str = ""
    output: Any = None
    outputs: Any = None
    results: Any = None
    error: Any = None
    status: Any = None
    # What the model needs not know.
    caller: Any = None
    environment: Any = None
    max_output_length: Any = None

    def as_messages(self) -> list[dict[str, Any]]:
        name = _full(self.namespace, self.name) or self.type.removesuffix("_call")
        call_id = self.call_id or self.id
        values = (self.output, self.outputs, self.results, self.error, self.status)
        result = next((value for value in values if value is not None), "")
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        if self.type.endswith("_output"):
            return [_result(call_id, text)]
        call = _call(call_id, name, self.arguments or json.dumps(self.model_extra))
        return [call, _result(call_id, text)] if self.type in _WITH_RESULT else [call]


def _full(namespace: str, name: str) -> str:
    """Return the full name of a tool, with its namespace unless that is "functions"."""
    return f"{namespace}.{name}" if namespace not in ("", "functions") else name


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


_KINDS: dict[str, type[InputMessage | InputCall | InputResult | ToolsItem | OtherItem]] = {
    "message": InputMessage,
    "additional_tools": ToolsItem,
    "function_call": InputCall,
    "function_call_output": InputResult,
    "custom_tool_call_output": InputResult,
    **dict.fromkeys((*_CALLS, *_OUTPUTS, *_WITH_RESULT), OtherItem),
}
"""Items of a conversation that become messages. Reasoning of an earlier answer is a field of the
next message. Other items are refused."""


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat = TextFormat()


class ReasoningOptions(Body):
    effort: str | None = None


class Namespace(Body):
    name: str
    description: str | None = None


class FunctionTool(Body):
    """A function or custom tool, not nested as in a chat."""

    type: Literal["function", "custom"]
    name: str
    namespace: Namespace = Namespace(name="")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None  # of the input of a custom tool

    @property
    def full_name(self) -> str:
        return _full(self.namespace.name, self.name)


class NamedFunction(Body):
    type: Literal["function", "custom"]
    name: str


class ResponsesRequest(CommonRequest, CallingRequest):
    """`POST /v1/responses`. Nothing is stored: a conversation is sent whole."""

    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: Items[OrOtherTool[FunctionTool]] = Field(default=[])
    tool_choice: (
        Literal["none", "auto", "required"] | NamedFunction | AllowedTools[NamedFunction]
    ) = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default={})  # as in a chat

    previous_response_id: Annotated[None, _STORED] = None
    conversation: Annotated[None, _STORED] = None
    background: Annotated[None, _STORED] = None
    prompt: Annotated[None, Refused("needs stored prompts: send its text as instructions")] = None

    # Accepted and unused. A conversation that is too long is an error, whatever it says.
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_all_tools(cls, fields: Any) -> Any:
        """Make tools of items and of namespaces tools of the request."""
        given = (fields.get("tools") or []) if isinstance(fields, dict) else None
        if not isinstance(given, list):
            return fields
        items, tools = fields.get("input"), [*given]
        for item in items if isinstance(items, list) else ():
            if _is(item, "additional_tools") and isinstance(item.get("tools"), list):
                tools += item["tools"]
        flat = [tool for entry in tools for tool in _flat(entry)]
        return {**fields, "tools": flat} if flat else fields

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield paths of fields that are ignored, with thoughts that only OpenAI can read."""
        yield from super().unknown(path)
        for index, fields in enumerate(self.input if isinstance(self.input, list) else ()):
            if fields.get("encrypted_content") and not _thoughts(fields):
                yield f"input.{index}.encrypted_content"

    def chat(self) -> ChatRequest:
        """Return the same request as a chat. Raises ApiError if it is invalid as a chat."""
        same = ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys()
        fields = {name: getattr(self, name) for name in same - {"stream_options"}}
        form = self.text.format
        if form.type == "json_schema":
            if form.schema_ is None:
                raise bad_request("text.format needs a schema", "text.format.schema")
            named = {"name": form.name, "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        elif form.type == "json_object":
            fields["response_format"] = {"type": "json_object"}
        fields["tools"] = list(map(_nested, self.tools))
        if isinstance(self.tool_choice, NamedFunction):
            fields["tool_choice"] = _nested(self.tool_choice)
        elif isinstance(self.tool_choice, AllowedTools):
            allowed = list(map(_nested, self.tool_choice.tools))
            fields["tool_choice"] = {**self.tool_choice.model_dump(), "tools": allowed}
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["reasoning_effort"] = self.reasoning.effort
        return chat_of(fields)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thoughts = ""
        for index, fields in enumerate(self.input):
            if fields.get("type") == "reasoning":
                thoughts += _thoughts(fields)
                continue
            for message in _messages_of(index, fields):
                if thoughts and message["role"] == "assistant":
                    message["reasoning_content"] = thoughts
                else:
                    messages += _broken_off(thoughts)
                thoughts = ""
                last: dict[str, Any] = messages[-1] if messages else {"role": ""}
                if "tool_calls" not in message or last["role"] != "assistant":
                    messages.append(message)
                    continue
                # Calls of one answer are one message.
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                if "reasoning_content" in message:
                    before = last.get("reasoning_content", "")
                    last["reasoning_content"] = before + message["reasoning_content"]
        return messages + _broken_off(thoughts)


def _broken_off(thoughts: str) -> list[dict[str, Any]]:
    """Return an answer that ended with its thoughts; nothing without any."""
    message = {"role": "assistant", "content": "", "reasoning_content": thoughts}
    return [message] if thoughts else []


def _nested(tool: FunctionTool | NamedFunction | OtherTool) -> dict[str, Any]:
    """Return a tool, or the name of one, in the form of a chat."""
    if isinstance(tool, OtherTool):
        return {"type": tool.type}
    facts = tool.model_dump(exclude={"type", "namespace"})
    if isinstance(tool, FunctionTool):
        facts["name"] = tool.full_name
        if about := tool.namespace.description:
            facts["description"] = f"{about}\n\n{tool.description or ''}".strip()
    return {"type": tool.type, tool.type: facts}


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and value.get("type") == kind


def _flat(entry: Any) -> list[Any]:
    """Return a tool, or the tools of a namespace, of which the first has its description."""
    tools = entry.get("tools") if _is(entry, "namespace") else None
    if not isinstance(tools, list):
        return [entry]
    name, about = ({"name": entry.get("name")}, {"description": entry.get("description")})
    return [
        {**tool, "namespace": name if index else name | about} if isinstance(tool, dict) else tool
        for index, tool in enumerate(tools)
    ]


def _thoughts(fields: dict[str, Any]) -> str:
    """Return the text of a reasoning item, or else its summary; empty if it is encrypted."""
    for name in ("content", "summary"):
        parts = fields.get(name)
        listed = parts if isinstance(parts, list) else []
        texts = [part.get("text") for part in listed if isinstance(part, dict)]
        if joined := "".join(text for text in texts if isinstance(text, str)):
            return joined
    return ""


def _messages_of(index: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    kind = fields.get("type")
    if kind is None:  # OpenAI's clients leave out the type of these two
        kind = "item_reference" if fields.keys() == {"id"} else "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join((*_KINDS, "reasoning"))
        raise bad_request(
            f"an item of type {kind!r} is not supported: send what it stands for as a message, or "
            f"one of {known}",
            f"input.{index}",
        )
    try:
        return _KINDS[kind].model_validate(fields).as_messages()
    except ValidationError as error:
        failure = from_validation(error)
        place = f"input.{index}"
        failure.param = f"{place}.{failure.param}" if failure.param else place
        failure.message = f"{place}.{failure.message}"
        raise failure from None


@contextmanager
def errors_of_response() -> Iterator[None]:
    """Let errors of the chat that a response becomes name the fields of the response."""
    try:
        yield
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise
    except InvalidRequestError as error:
        if (param := error.metadata.get("param", "")) in _PARAMS:
            error.metadata = {**error.metadata, "param": _PARAMS[param]}
        raise


class ResponsesWriter(PartsWriter):
    """Formats one response: items that are a message or a call, and some fields of the request."""

    def __init__(self, job: GenerationJob, use: ToolUse, body: ResponsesRequest) -> None:
        super().__init__(job, use)
        self._request = body
        self._use = use
        self._names = {
            tool.full_name: {"namespace": tool.namespace.name, "name": tool.name}
            for tool in body.tools
            if isinstance(tool, FunctionTool) and tool.namespace.name
        }
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._output: list[Json] = []
        self._events = 0

    def opening(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> list[Json]:
        """Return the response without output."""
        return [
            self._event(f"response.{state}", response=self._body(None))
            for state in ("created", "in_progress")
        ]

    def ending(self, index: int, result: GenerationResult) -> list[Json]:
        """Return the end of the last item, and the whole response."""
        events = self._write(self._answer.flush())
        if not self._output:
            events += self._begin("message")
        events += self._close()
        response = self._body(result)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: ApiError) -> list[Json]:
        """Return two events, as OpenAI does: some clients read the error, others the response."""
        told = error.body["error"]
        code = "invalid_prompt" if error.status < 500 else "server_error"
        code = "rate_limit_exceeded" if error.status == 429 else code
        if self._open:
            self._output[-1]["status"] = "incomplete"
        failure = {"code": code, "message": told["message"]}
        param = _PARAMS.get(told["param"], told["param"])
        return [
            self._event("error", message=told["message"], code=told["code"] or code, param=param),
            self._event(
                "response.failed",
                response=self._body(None) | {"status": "failed", "error": failure},
            ),
        ]

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
        """Begin a message, or what the model thinks."""
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
        if not self._open:
            return []
        item = self._output[-1]
        item["status"] = "completed"
        part = item["content"][0]
        done = self._text_event("done", text=part["text"])
        self._open = ""
        return [done, self._part_event("content_part.done", part=part), self._item_event("done")]

    def _call(self, call: Call) -> list[Json]:
        kind, id, field, given = "function_call", "fc", "arguments", call.arguments
        if call.name in self._use.custom:
            kind, id, field, given = "custom_tool_call", "ctc", "input", call.input
        item = {"id": _new_id(id), "type": kind, "status": "in_progress", "call_id": call.id}
        item |= {"name": call.name, **self._names.get(call.name, {}), field: ""}
        self._output.append(item)
        events = [self._item_event("added")]
        item |= {"status": "completed", field: given}
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return [
            *events,
            self._event(f"response.{kind}_{field}.delta", **place, delta=given),
            self._event(
                f"response.{kind}_{field}.done", **place, name=item["name"], **{field: given}
            ),
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

    def _body(self, result: GenerationResult | None) -> Json:
        body = self._request
        status, reason = "in_progress", None
        if result is not None:
            status = "incomplete" if result.finish_reason == "length" else "completed"
            reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        repeated = body.model_dump(
            include={
                *("instructions", "max_output_tokens", "temperature", "top_p"),
                *("tool_choice", "parallel_tool_calls", "metadata", "text"),
            },
            by_alias=True,
        )
        if not self._use.tools and body.tool_choice != "none":
            repeated["tool_choice"] = "auto"
        unused = {
            "function": {"namespace", "format"},
            "custom": {"namespace", "parameters", "strict"},
        }
        tools = [
            tool.model_dump(exclude=unused[tool.type]) | {"name": tool.full_name}
            for tool in body.tools
            if not isinstance(tool, OtherTool)
        ]
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
            "tools": tools,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "store": False,
            "usage": None if result is None else self._usage(result),
            **({} if result is None else told(self._job, result)),
        }

    def _usage(self, result: GenerationResult) -> Json:
        counted = usage(self._job, [result], self._answer.reasoning_tokens)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
            "speculation": counted["speculation"],
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
