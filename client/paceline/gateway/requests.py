"""The requests of the gateway: OpenAI's fields, and other servers'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import (
    AliasChoices,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.sampling import MAX_LOGIT_BIAS
from paceline.sampling.json_schema import embedded

from .bodies import Body, Refused, present
from .errors import bad_request, from_validation
from .tool_schemas import closed

MAX_ITEMS = 4096  # maximum number of items in a list: messages, calls, parts, tools, choices
MAX_NAME = 512  # maximum length of a name: of a model, a drafter, a user; in characters
MAX_PROMPTS = 1024  # maximum number of prompts of one request
MAX_CHOICES = 64  # maximum number of choices of one prompt
MAX_STOP_CHARACTERS = 4096  # maximum length of a stop string, in characters

Item = TypeVar("Item")
AnyFunction = TypeVar("AnyFunction", bound=Body)

# A list of a request. Its first invalid item is the only error.
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_Choices = Annotated[Items[str], Field(min_length=1)]

# An empty one would be no constraint, without a word.
_Source = Annotated[str, Field(min_length=1)]

# Maximum number of new tokens. A text ends earlier where its context is full.
Limit = Annotated[int, Field(ge=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Token = Annotated[int, Field(ge=0, lt=2**32)]
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True)]
_TokenText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[list[_StopText], Field(max_length=16, fail_fast=True)]
_Name = Annotated[str, Field(max_length=MAX_NAME)]


class TextPart(Body):
    """A part of a message; only text is supported."""

    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_known_type(cls, fields: Any) -> Any:
        known = get_args(cls.model_fields["type"].annotation) if "type" in cls.model_fields else ()
        kind = fields.get("type") if isinstance(fields, dict) else None
        if isinstance(kind, str) and known and kind not in known:
            raise PydanticCustomError(
                "part",
                "a part of type {kind} is not supported, expected text in a part of type {known}",
                {"kind": repr(kind), "known": " or ".join(map(repr, known))},
            )
        return fields


class ContentPart(TextPart):
    type: Literal["text", "refusal"]


def text_of(content: str | Sequence[TextPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal for part in content)


class FunctionCall(Body):
    """A function and its arguments: JSON as text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A call that the model made earlier. One of a custom tool is one of a function here, whose
    argument is the input."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, fields: Any) -> Any:
        custom = fields.get("custom") if isinstance(fields, dict) else None
        if not isinstance(custom, dict) or fields.get("type") != "custom":
            return fields
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        return {"id": fields.get("id"), "function": function}


class Message(Body):
    """One message of a conversation, such as one of this gateway's own answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] = Field(default=[])
    tool_call_id: str | None = None
    # Of other servers and of templates: what the model thought before, and functions of a system
    # message.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_plan: str | None = None
    tools: str | Items[dict[str, Any]] | None = None
    # Of OpenAI's answers, and without a place in a template.
    refusal: str | None = None
    annotations: Items[Any] = Field(default=[])
    function_call: Annotated[None, Refused("is not supported: send tool_calls")] = None
    audio: Annotated[None, Refused("is not supported: send its transcript as content")] = None

    def for_template(self) -> dict[str, Any]:
        """Return the message for `render_chat`: what templates know, without absent fields."""
        content: Any = self.content or self.refusal or self.content
        if isinstance(content, list):
            content = [{"type": "text", "text": part.text or part.refusal} for part in content]
        calls = [
            call.model_dump(
                include={"id": True, "type": True, "function": {"name", "arguments"}},
                exclude=None if call.id else {"id"},
            )
            for call in self.tool_calls
        ]
        names = ("name", "tool_call_id", "tools", "tool_plan", "thinking")
        optional = {name: getattr(self, name) for name in names}
        optional |= {"reasoning_content": self.reasoning_content, "reasoning": self.reasoning}
        fields = {"role": self.role, "content": content or "" if content == [] else content}
        fields |= {**optional, "tool_calls": calls or None}
        return {name: value for name, value in fields.items() if value is not None}


class InputFormat(Body):
    """Which texts a custom tool takes: all, or texts of a grammar."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] = "lark"
    definition: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_chat(cls, fields: Any) -> Any:
        grammar = fields.get("grammar") if isinstance(fields, dict) else None
        return {**grammar, "type": "grammar"} if isinstance(grammar, dict) else fields

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield the paths of fields that are ignored. A grammar in Lark's notation is shown to the
        model, but binds nothing: the input is a text within JSON."""
        yield from super().unknown(path)
        if self.definition and self.syntax == "lark":
            yield f"{path}definition"


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] = _NO_ARGUMENTS  # JSON schema of its arguments
    strict: bool | None = None
    format: InputFormat | None = None  # of the input of a custom tool


class Tool(Body):
    """A function, or a custom tool, whose input is a text."""

    type: Literal["function", "custom"] = "function"
    function: Function = Field(validation_alias=AliasChoices("function", "custom"))
    _sent: dict[str, Any] = PrivateAttr(default={})

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, fields: Any, validate: Callable[[Any], Self]) -> Self:
        tool = validate(fields)
        if isinstance(fields, dict):
            tool._sent = fields
        return tool

    def for_template(self) -> dict[str, Any]:
        """Return the tool for `render_chat` as it was sent, in its order, since templates print it.
        Null fields are absent ones, but what a schema has as null is a part of the schema."""
        sent = self._sent.get("function") or self._sent["custom"]
        function = present(sent) | {"parameters": self.function.parameters}
        return {"type": "", **present(self._sent)} | {"type": "function", "function": function}

    def as_function(self) -> Tool:
        """Return the tool as a function; a custom tool's has its input as only argument."""
        if self.type == "function":
            return self
        form = self.function.format or InputFormat()
        text, told = {"type": "string"}, [self.function.description or ""]
        if form.definition:
            told.append(f"The input must fit this grammar ({form.syntax}):\n{form.definition}")
            text |= {"pattern": f"^(?:{form.definition})$"} if form.syntax == "regex" else {}
        schema = {**_NO_ARGUMENTS, "properties": {"input": text}, "required": ["input"]}
        facts = {"description": "\n\n".join(filter(None, told)), "parameters": schema}
        fields = {"type": self.type, "function": {"name": self.function.name, **facts}}
        return Tool.model_validate(fields)


class OtherTool(Body):
    """A tool that its caller does not run, such as web_search: it is left out, with a warning."""

    type: str

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield its type, and its name if it has one."""
        fields = self.model_extra or {}
        inner = fields.get(self.type)
        name = (inner if isinstance(inner, dict) else fields).get("name")
        yield f"{path}{self.type}.{name}" if isinstance(name, str) else f"{path}{self.type}"


def kind_of(value: Any) -> str | None:
    """Return the type of a part of a request, validated or not; None if it has none."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def _kind_of_tool(tool: Any) -> str:
    return "Function" if kind_of(tool) in (None, "function", "custom") else "Other"


OrOtherTool = Annotated[
    Annotated[AnyFunction, Tag("Function")] | Annotated[OtherTool, Tag("Other")],
    Discriminator(_kind_of_tool),
]  # a function or custom tool in the form of an endpoint, or another tool


class AllowedTools(Body, Generic[AnyFunction]):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[OrOtherTool[AnyFunction]], Field(min_length=1)]


class CallingRequest(Body):
    """Fields of a request whose answer may call functions."""

    tools: Items[Any] = Field(default=[])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    thinking_token_budget: int | None = Field(default=None, ge=0, lt=2**31)
    """Maximum number of tokens of a thought, which the mark that ends it follows then."""

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _of_functions(cls, choice: Any) -> Any:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "allowed_tools" and isinstance(choice.get(kind), dict):
            return {**choice[kind], "type": kind}  # a chat's form
        if isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools"):
            raise PydanticCustomError(
                "tool_choice",
                "a tool of type {kind} cannot be called here, expected one of type 'function' or "
                "'custom', or 'allowed_tools'",
                {"kind": repr(kind)},
            )
        return choice

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield paths of fields that are ignored, as a required call if no tool is left for it."""
        yield from super().unknown(path)
        choice = self.tool_choice
        mode, tools = choice, self.tools
        if isinstance(choice, AllowedTools):
            mode, tools = choice.mode, choice.tools
        if mode == "required" and tools and all(isinstance(tool, OtherTool) for tool in tools):
            yield f"{path}tool_choice"


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request, and how they may be called."""

    tools: Sequence[Tool]
    # "auto" leaves the choice to the model; "required" and "named" enforce calls.
    mode: Literal["none", "auto", "required", "named"]
    parallel: bool = True  # whether there may be several calls
    name: str = ""  # function to be called, in mode "named"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def custom(self) -> frozenset[str]:
        """Names of the custom tools."""
        return frozenset(tool.function.name for tool in self.tools if tool.type == "custom")

    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of a text that is the enforced calls; None if none are.

        A named function's text is its arguments, other calls are an array of objects with `name`
        and `arguments`. Objects that do not say so have no other properties than those they name.

        Raises ``ValueError`` if the names of parts of a schema are malformed, or too long.
        """
        functions: dict[str, dict[str, Any]] = {
            tool.function.name: closed(tool.function.parameters) for tool in self.tools
        }
        if self.mode == "named":
            return functions[self.name]
        if self.mode != "required":
            return None
        calls, definitions = [], {}
        for index, (name, parameters) in enumerate(functions.items()):
            definitions[f"arguments{index}"] = embedded(parameters, f"#/$defs/arguments{index}")
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": name},
                        "arguments": {"$ref": f"#/$defs/arguments{index}"},
                    },
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        limit = {} if self.parallel else {"maxItems": 1}
        return {
            "type": "array",
            "items": {"anyOf": calls},
            "minItems": 1,
            **limit,
            "$defs": definitions,
        }


class FreeText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]
    schema_: dict[str, Any] = Field(default={"type": "object"}, alias="schema")


class NamedSchema(Body):
    """A JSON schema. It is always enforced, whatever `strict` is."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchema(Body):
    """JSON that is an instance of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[FreeText | JsonObject | JsonSchema, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's form; one of its fields is set."""

    json_: dict[str, Any] | _Source | None = Field(default=None, alias="json")
    regex: _Source | None = None
    choice: _Choices | None = None
    grammar: _Source | None = None
    json_object: bool = False


class Constrained(Body):
    response_format: ResponseFormat = FreeText(type="text")
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | _Source | None = None
    guided_regex: _Source | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Source | None = None
    json_schema: dict[str, Any] | None = None
    grammar: _Source | None = None  # a grammar in llama.cpp's GBNF or in Lark's notation

    def constraint(self) -> dict[str, Any]:
        """Return the constraint, as an argument of `Client.generate`; empty: none. Raises ApiError
        if there are several."""
        form, vllm = self.response_format, self.structured_outputs or StructuredOutputs()
        schemas = [vllm.json_, self.guided_json, self.json_schema]
        if isinstance(form, JsonSchema):
            schemas.append(form.json_schema.schema_)
        elif isinstance(form, JsonObject):
            schemas.append(form.schema_)
        schemas += [{"type": "object"}] if vllm.json_object else []
        lists = (vllm.choice, self.guided_choice)
        regexes = [f"(?:{'|'.join(map(re.escape, texts))})" for texts in lists if texts is not None]
        given: list[tuple[str, Sequence[Any]]] = [
            ("json_schema", schemas),
            ("regex", (vllm.regex, self.guided_regex, *regexes)),
            ("grammar", (vllm.grammar, self.guided_grammar, self.grammar)),
        ]
        chosen = [(name, value) for name, values in given for value in values if value is not None]
        if len(chosen) > 1:
            raise bad_request(
                "a text can have one constraint: send one of response_format, structured_outputs, "
                "guided_*, json_schema and grammar",
                "response_format",
            )
        return dict(chosen)


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: bool = False  # end with an event that has `usage` and no choices
    include_rounds: bool = False  # add its tree and the proposer of each piece to each event
    # A field of OpenAI's against measuring the length of tokens; there is no padding here.
    include_obfuscation: bool = False


class UnusedFields(Body):
    """Accepted and unused: many programs always send them, and no text depends on them."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CommonRequest(UnusedFields):
    """Fields of every kind of request. Other ranges than those here are in `GenerationOptions`."""

    model: _Name | None = None
    temperature: float = Field(default=1.0, le=100)
    top_p: float = 1.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stream: bool = False

    # Extensions, with the names of other servers.
    top_k: int = Field(default=0, ge=-1, lt=2**32)  # 0 and -1 keep all tokens
    min_p: float = 0.0
    repetition_penalty: float = Field(default=1.0, le=100)
    drafter: _Name | None = None
    """Name of a drafter; "none" turns speculation off, "local" is the verifier's own guesses. The
    text does not depend on it."""
    user: _Name | None = None
    """Whose text it is: KV and drafts of earlier texts are reused for the same user only."""
    receipt: bool = False
    """Return each text's receipt, by which anybody can check its tokens."""
    isolated: bool = False
    """Draft without any other text, and keep this one from later texts: to measure drafting."""


class GenerationRequest(CommonRequest, Constrained):
    """Fields of both kinds of completion."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: (
        Annotated[
            dict[_TokenText, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS, fail_fast=True),
        ]
        | None
    ) = None
    stop: _StopText | Stops | None = None
    stream_options: StreamOptions = StreamOptions()
    stop_token_ids: Annotated[list[_Token], Field(max_length=1024, fail_fast=True)] = Field(
        default=[]
    )
    ignore_eos: bool = False

    def seed_of(self, choice: int) -> int | None:
        """Return the seed of one of the n choices: the request's plus its index, so that the first
        equals the only one of a request with n=1."""
        return None if self.seed is None else (self.seed + choice) % 2**64

    def sampling(self) -> dict[str, Any]:
        """Return the sampling arguments of `Client.generate`, but the seed."""
        names = (
            *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "stop_token_ids", "ignore_eos", "drafter", "isolated"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "top_k": max(0, self.top_k),
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "stop": self.stop or (),
            **self.constraint(),
        }


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: (
        str
        | _Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: int = Field(default=16, ge=0)
    """0 with `echo` returns the prompt, and with `logprobs` its log-probabilities."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    """What comes after the text, for models that know texts in the middle."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _not_too_many(cls, prompt: Any) -> Any:
        """Return only the error of too many prompts, instead of one for each form of them."""
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and type(prompt[0]) is not int:
            raise PydanticCustomError(
                "too_long",
                "there are {count} prompts, expected at most {most}",
                {"count": len(prompt), "most": MAX_PROMPTS},
            )
        return prompt

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ChatRequest(GenerationRequest, CallingRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Items[OrOtherTool[Tool]] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | Tool | AllowedTools[Tool] = "auto"
    functions: Annotated[None, Refused("is not supported: send tools")] = None
    function_call: Annotated[None, Refused("is not supported: send tool_choice")] = None
    modalities: Items[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})  # more variables of the chat template
    reasoning_effort: str | None = None  # variable of the chat template
    documents: Items[dict[str, Any]] | None = None
    """Variable of the chat template, for answers from documents."""
    add_generation_prompt: bool = True  # end the prompt with the beginning of an answer
    continue_final_message: bool = False
    """End the prompt with the text of the last message, which the answer continues."""

    def variables(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        if effort is None:
            return self.chat_template_kwargs
        # Templates of Qwen and others know no effort, and a switch instead.
        switch = {"enable_thinking": False} if effort == "none" else {}
        return {"reasoning_effort": effort, **switch, **self.chat_template_kwargs}

    def tool_use(self) -> ToolUse:
        """Return its tools and how they may be called. Raises ApiError if a tool that must be
        called does not exist."""
        tools = [tool.as_function() for tool in self.tools if isinstance(tool, Tool)]
        choice = self.tool_choice
        named: Sequence[Tool | OtherTool] = ()
        if isinstance(choice, Tool):
            named = [choice]
        elif isinstance(choice, AllowedTools):
            named = choice.tools
        names = {tool.function.name for tool in named if isinstance(tool, Tool)}
        if missing := sorted(names - {tool.function.name for tool in tools}):
            raise bad_request(f"tools has no function {missing[0]!r}", "tool_choice")
        if isinstance(choice, Tool):
            return ToolUse(tools, "named", self.parallel_tool_calls, choice.function.name)
        if isinstance(choice, AllowedTools):
            tools = [tool for tool in tools if tool.function.name in names]
            choice = choice.mode
        elif choice == "required" and not self.tools:
            raise bad_request("tool_choice 'required' needs tools", "tool_choice")
        if choice == "none" or not tools:
            return ToolUse([], "none")
        return ToolUse(tools, choice, self.parallel_tool_calls)

    def constraint(self) -> dict[str, Any]:
        """Return the constraint of the text, or of a call that tool_choice requires."""
        constraint = super().constraint()
        try:
            schema = self.tool_use().schema()
        except ValueError as error:
            why = f"the parameters of a tool cannot be read as a JSON schema: {error}"
            raise bad_request(why, "tools") from error
        if constraint and schema is not None:
            raise bad_request(
                "a call that tool_choice requires leaves no room for a constrained text: send "
                "either",
                "tool_choice",
            )
        return constraint if schema is None else {"json_schema": schema}


def chat_of(fields: dict[str, Any]) -> ChatRequest:
    """Return the chat that another request becomes. Raises ApiError if it is invalid as a chat."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None
