"""Chat templates, rendered as transformers renders them.

A template is given what it can show. Whether it shows tools, calls, lists of parts or a system
message is found by rendering short conversations, never by looking at its source. Whether it shows
every message is found by rendering the conversation again with a word at the end of each.

This file needs Jinja and nothing else of the project, because it is also a program: it renders the
conversations that it reads from its standard input, within limits of time and memory. See
`_template_process.py`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, BinaryIO, Literal, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]
Tool = Mapping[str, Any]

_MAX_OUTPUT = 32 << 20
"""Longest prompt. Unit: characters."""
HEAD = struct.Struct("!Q")
"""Length of a message between a process and its parent."""

# As in transformers, where a template can only fail to end with it by changing its white space.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
# Names of a message's reasoning; templates read one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# The form of the Hermes models (https://github.com/NousResearch/Hermes-Function-Calling), which
# many models were trained with.
_HERMES_TOOLS = """You may call functions. Their signatures, as JSON, are inside <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object with the function's name and arguments inside tags:
<tool_call>
{{"name": <function name>, "arguments": <object>}}
</tool_call>"""

_Way = Literal["tools", "xml_tools", "system", "text"]
"""How tools reach a template: in the variable of all templates; in the variable of SmolLM3; in the
field `tools` of the system message, as for Phi-4-mini; as text of a message."""

_Absent = Literal["missing", "none", "empty"]
"""How a template is told that a message has no content."""

_ABSENT: tuple[_Absent, ...] = ("missing", "none", "empty")

_ASKED, _SYSTEM, _OFFERED, _WANTED, _ARGUMENT, _RESULT = (
    f"paceline{index}probe" for index in range(6)
)

_ARGUMENTS = json.dumps({"x": _ARGUMENT})

_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _OFFERED,
        "description": "A function.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A text."}},
            "required": ["x"],
        },
    },
}

_CALL: Message = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": _WANTED, "arguments": _ARGUMENTS},
}


class TemplateRefusal(ValueError):
    """A template cannot be read, or refuses a conversation. `param` is the argument at fault."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class Prompt(str):
    """A rendered conversation."""

    changes: str
    """What was done to messages so that the template shows them all; empty: nothing."""

    def __new__(cls, text: str, changes: str) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.changes = changes
        return prompt


@dataclass(frozen=True)
class Conversation:
    """What is rendered. All values are those of JSON."""

    templates: Mapping[str, str]
    """Templates of the model by name."""

    messages: Sequence[Mapping[str, Any]]
    """In the form of OpenAI's API."""

    template: str | None = None
    """Name of a template, or a template; None: "tool_use" with tools, or "default"."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables of the template with the texts of special tokens."""

    tools: Sequence[Tool] = ()
    """In the form of OpenAI's API."""

    documents: Sequence[Mapping[str, Any]] | None = None
    """Variable of templates for answers from documents."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template."""

    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""

    continue_final_message: bool = False
    """End the prompt with the text of the last message instead."""

    def render(self) -> Prompt:
        """The prompt, with its special tokens as text.

        Where the template refuses messages in their order, or leaves some out, they are arranged
        in other ways (`_arrangements`). The first that shows all is the prompt; if none does, the
        one that leaves out the fewest.

        Raises `TemplateRefusal`: the template refuses all arrangements; with its words about the
        messages as they are.
        """
        messages = [_normalized(message) for message in self.messages]
        final = self._mark_final(messages) if self.continue_final_message else ""
        refusals: list[TemplateRefusal] = []
        found: list[tuple[int, Prompt]] = []
        for changes, arranged in _arrangements(messages):
            try:
                text, lost = self._shown(arranged, final), self._lost(arranged, final)
            except TemplateRefusal as refusal:
                refusals.append(refusal)
                continue
            left_out = f"the chat template leaves out {lost} of the messages" if lost else ""
            found.append((lost, Prompt(text, "; ".join(filter(None, (changes, left_out))))))
            if not lost:
                break
        if not found:
            raise refusals[0]
        return min(found, key=lambda each: each[0])[1]

    def _shown(self, messages: list[Message], final: str) -> str:
        """The prompt of these messages, the last of which may end with the tag."""
        template = _known(self._source(), tuple(sorted(self.special_tokens.items())))
        begin_answer = self.add_generation_prompt and not self.continue_final_message
        values = {"documents": self.documents, **self.variables}
        try:
            text = template.show(
                messages, self.tools, values | {"add_generation_prompt": begin_answer}
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise TemplateRefusal(
                f"messages and tools must have the form of OpenAI's API: {error!r}"
            ) from None
        return _up_to_tag(text, final) if self.continue_final_message else text

    def _lost(self, messages: list[Message], final: str) -> int:
        """Number of messages whose text is not in the prompt."""
        words, marked = [], []
        for index, message in enumerate(messages):
            text = text_of(message.get("content"))
            if text.strip() and not text.endswith(_CONTINUED):
                words.append(f"paceline{index}shown")
                content, word = message["content"], words[-1]
                end = [{"type": "text", "text": word}] if isinstance(content, list) else word
                message = {**message, "content": content + end}
            marked.append(message)
        text = self._shown(marked, final)
        return sum(word not in text for word in words)

    def _source(self) -> str:
        if self.template is not None:
            return self.templates.get(self.template, self.template)
        for name in ("tool_use", "default") if self.tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        raise TemplateRefusal(
            f"none of the model's chat templates is the default one: name one of "
            f"{', '.join(self.templates)}"
        )

    def _mark_final(self, messages: list[Message]) -> str:
        """Puts the tag behind the last message's text, which is returned."""
        last = messages[-1]
        content = last.get("content")
        if isinstance(content, str):
            last["content"] += _CONTINUED
            return content
        for part in reversed(content or ()):
            if isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] += _CONTINUED
                return text
        raise TemplateRefusal(
            "the last message cannot be continued: it has no text", "continue_final_message"
        )


def _normalized(message: Mapping[str, Any]) -> Message:
    """A copy of a message as templates expect it: without absent fields, and with its reasoning
    under each name that templates use. Role "developer" is "system"."""
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "developer":
        fields["role"] = "system"
    if isinstance(fields.get("content"), list | tuple):
        fields["content"] = [dict(part) for part in fields["content"]]
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _arrangements(messages: list[Message]) -> Iterator[tuple[str, list[Message]]]:
    """The messages as they are, and what they become for a template that does not take them so,
    each with a description: all system messages as the first one; besides, with alternating turns;
    system messages as turns of the user; texts beside calls as messages of their own."""
    tried = [messages]
    yield "", messages
    first = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    merged = "system messages were merged into the first one"
    turns = "turns were merged or added so that user and assistant alternate"
    users = "system messages became the user's"
    texts = "texts beside calls became messages of their own"
    as_user = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages]
    for changes, arranged in (
        (merged, _merged(first) + others),
        (turns if len(first) < 2 else f"{merged}; {turns}", _alternating(_merged(first) + others)),
        (users, _alternating(as_user)),
        (texts, _apart(messages)),
        (f"{users}; {texts}", _apart(_alternating(as_user))),
    ):
        if arranged not in tried:
            tried.append(arranged)
            yield changes, arranged


def _alternating(messages: list[Message]) -> list[Message]:
    """Messages whose turns of user and assistant alternate, beginning with the user's. A result
    without a call is the user's. Turns that are missing are added, with a space, since templates
    refuse empty ones."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else {"role": ""}
        after_call = last["role"] == "tool" or bool(calls_of(last))
        if message["role"] == "tool" and not after_call:
            (message,) = _calls_as_text([message])
        missing = (
            "user" if message["role"] == "assistant" and last["role"] in ("", "system") else ""
        )
        if message["role"] == "user" and after_call:
            missing = "assistant"
        if missing:
            turns.append({"role": missing, "content": " "})
        turns.append(message)
    return _merged(turns)


def _apart(messages: list[Message]) -> list[Message]:
    """Messages without text beside calls, which is a message before them."""
    found: list[Message] = []
    for message in messages:
        if calls_of(message) and message.get("content"):
            found.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "tool_calls": message["tool_calls"]}
        found.append(message)
    return found


def _merged(messages: list[Message]) -> list[Message]:
    """Messages in which those of one role in a row are one. Calls, and what is behind them, are
    kept apart."""
    groups: list[list[Message]] = []
    for message in messages:
        last = groups[-1][-1] if groups else {"role": ""}
        if last["role"] != message["role"] or message["role"] == "tool" or calls_of(last):
            groups.append([])
        groups[-1].append(message)
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups]


def _as_one(messages: list[Message]) -> Message:
    contents = [message["content"] for message in messages if message.get("content")]
    content: Any = "\n\n".join(each for each in contents if isinstance(each, str))
    if any(isinstance(each, list) for each in contents):
        content = [
            part
            for each in contents
            for part in (each if isinstance(each, list) else [{"type": "text", "text": each}])
        ]
    return {name: value for each in messages for name, value in each.items()} | {"content": content}


def _up_to_tag(text: str, final: str) -> str:
    """A rendered conversation up to the tag behind its last message.

    White space at the end is that of the message where the template keeps it.
    """
    at = text.rfind(_CONTINUED.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateRefusal(
            "the last message cannot be continued: the template leaves its text out, or a part",
            "continue_final_message",
        )
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


@dataclass(frozen=True)
class _Form:
    """How messages with calls are given to a template."""

    absent: _Absent = "missing"
    arguments_are_text: bool = False
    names_in_ids: bool = False
    """Whether a call is told by its id alone, as for Kimi: `functions.NAME:INDEX`."""

    def of(self, messages: Iterable[Message], *, empty: bool = False) -> list[Message]:
        """The messages in this form. `empty`: an empty content beside calls is an absent one."""
        if self.names_in_ids:
            messages = _with_names_in_ids(messages)
        return [self._message(message, empty) for message in messages]

    def _message(self, message: Message, empty: bool) -> Message:
        message = dict(message)
        if "content" not in message or (empty and calls_of(message) and not message["content"]):
            message.pop("content", None)
            if self.absent != "missing":
                message["content"] = None if self.absent == "none" else ""
        if calls_of(message):
            message["tool_calls"] = [
                {**call, "function": self._function(call["function"])} for call in calls_of(message)
            ]
        return message

    def _function(self, function: Mapping[str, Any]) -> Message:
        arguments = function.get("arguments")
        if self.arguments_are_text:
            arguments = arguments if isinstance(arguments, str) else as_json(arguments)
        elif isinstance(arguments, str):
            arguments = _object(arguments)
        return {**function, "arguments": arguments}


_FORMS = [_Form(absent, text) for absent, text in product(_ABSENT, (False, True))]


class ChatTemplate:
    """A compiled template of a model, and what it can show."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._parts: dict[str, bool] = {}
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise TemplateRefusal(f"the chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        """A prompt. Raises `TemplateRefusal`."""
        everything = {"tools": None, "documents": None, **self._special_tokens, **values}
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**everything, "messages": messages}):
                size += len(piece)
                if size > _MAX_OUTPUT:
                    raise TemplateRefusal(f"its text is longer than {_MAX_OUTPUT} characters")
                pieces.append(piece)
        except Exception as error:  # a template may raise anything
            refused = f"{error}" or type(error).__name__
            raise TemplateRefusal(f"the chat template refuses these messages: {refused}") from None
        return "".join(pieces)

    def show(
        self, messages: Sequence[Message], tools: Sequence[Tool], values: Mapping[str, Any]
    ) -> str:
        """The prompt of a conversation with its tools, its calls and their results.

        What a template cannot show becomes text in the form of the Hermes models. Raises
        `TemplateRefusal`: the template refuses the conversation, or shows a part of it in no form.
        """
        messages = [{**m, "content": self._content(m)} if "content" in m else m for m in messages]
        has_calls = any(calls_of(message) or message["role"] == "tool" for message in messages)
        names = [function_of(tool).get("name", "") for tool in tools]
        way = self._way if tools else "tools"
        form = self._form if has_calls else _Form()
        if form is None:
            as_text = _calls_as_text(messages)
            attempts = [as_text, _merged(as_text)]
        else:
            attempts = _attempts(messages, form, has_calls)
        text = None
        try:
            text = self._first(
                [self._with_tools(each, tools, way) for each in attempts], names, values
            )
        except TemplateRefusal:
            if way != "text" and form is not None:  # it knows tools and calls, and has reasons
                raise
            form = None
        if text is None and form is not None:
            single = form.of(_one_call_each(messages))
            text = self._first([self._with_tools(single, tools, way)], names, values)
        if text is None:
            as_text = _calls_as_text(messages)
            others = [self._with_tools(as_text, tools, way)] if form is not None else []
            others.append(self._with_tools(as_text, tools, "text"))
            if tools:  # a later system message may have replaced the first
                others.append((self._before_user(as_text, _tools_as_text(tools)), {}))
            text = self._first(others, names, values)
        if text is None:
            raise TemplateRefusal("the chat template leaves out tools or calls of functions")
        return text

    def _first(
        self,
        attempts: Sequence[tuple[Sequence[Message], Mapping[str, Any]]],
        names: Sequence[str],
        values: Mapping[str, Any],
    ) -> str | None:
        """The prompt of the first messages and variables that has all names of tools and all calls;
        None: none has. Raises `TemplateRefusal`: all are refused."""
        refusals = []
        for messages, given in attempts:
            try:
                text = self.render(messages, {**values, **given})
            except TemplateRefusal as refusal:
                refusals.append(refusal)
                continue
            named = all(name in text or as_json(name)[1:-1] in text for name in names)
            if named and self._shows_calls(messages, {**values, **given}):
                return text
        if len(refusals) == len(attempts):
            raise refusals[0]
        return None

    def _shows_calls(self, messages: Sequence[Message], values: Mapping[str, Any]) -> bool:
        """Whether the prompt has every call: a word in place of its name, or in its arguments, or
        its id. The name itself may be elsewhere, as may the id in a result, which gets another."""
        wanted: list[tuple[str, str]] = []
        marked = []
        for message in messages:
            calls = []
            for call in calls_of(message):
                word = f"{_WANTED}{len(wanted)}z"
                wanted.append((word, call.get("id") or word))
                function = {**call["function"], "name": word}
                if isinstance(function.get("arguments"), dict):
                    function["arguments"] = {**function["arguments"], word: word}
                calls.append({**call, "function": function})
            if calls:
                message = {**message, "tool_calls": calls}
            elif isinstance(message.get("tool_call_id"), str):
                message = {**message, "tool_call_id": message["tool_call_id"][::-1]}
            marked.append(message)
        text = self._probe(marked, **values) if wanted else None
        return text is None or all(word in text or id in text for word, id in wanted)

    def _with_tools(
        self, messages: list[Message], tools: Sequence[Tool], way: _Way
    ) -> tuple[list[Message], dict[str, Any]]:
        if not tools:
            return messages, {"tools": self._no_tools}
        if way == "tools":
            return messages, {"tools": list(tools)}
        functions = [function_of(tool) for tool in tools]
        if way == "xml_tools":
            return messages, {"xml_tools": functions}
        if way == "system":
            first: Message = {"role": "system", "content": ""}
            if messages and messages[0]["role"] == "system":
                first, messages = messages[0], messages[1:]
            return [{**first, "tools": as_json(functions)}, *messages], {}
        return self._with_text(messages, _tools_as_text(tools)), {}

    def _with_text(self, messages: list[Message], text: str) -> list[Message]:
        """The messages with a text in the system message, or before the first user's."""
        if not self._takes_system:
            return self._before_user(messages, text)
        if not messages or messages[0]["role"] != "system":
            return [{"role": "system", "content": self._content({"content": text})}, *messages]
        old = text_of(messages[0].get("content"))
        changed = {**messages[0], "content": self._content({"content": f"{old}\n\n{text}"})}
        return [changed, *messages[1:]]

    def _before_user(self, messages: list[Message], text: str) -> list[Message]:
        """The messages with a text before the first user's."""
        for index, message in enumerate(messages):
            if message["role"] == "user":
                old = text_of(message.get("content"))
                changed = {**message, "content": self._content({"content": f"{text}\n\n{old}"})}
                return [*messages[:index], changed, *messages[index + 1 :]]
        return [{"role": "user", "content": self._content({"content": text})}, *messages]

    def _content(self, message: Message) -> Any:
        """Content in a form that the template takes: text, or a list of parts."""
        content = message["content"]
        if isinstance(content, list) and not self._takes_parts(message.get("role", "user")):
            return text_of(content)
        if isinstance(content, str) and not self._takes_text and self._takes_parts("user"):
            return [{"type": "text", "text": content}]
        return content

    # What a template can show. Each is found by rendering a conversation of words that no template
    # has by itself.

    @cached_property
    def _takes_text(self) -> bool:
        text = self._probe([{"role": "user", "content": _ASKED}])
        return text is None or _ASKED in text

    def _takes_parts(self, role: str) -> bool:
        """Whether it shows all texts of a list. Some templates do so for the user's messages alone,
        and some show the first text."""
        if role not in self._parts:
            part = {"type": "text", "text": _RESULT}
            second = {"type": "text", "text": _SYSTEM}
            message: Message = {"role": role, "content": [part, second]}
            asked: Message = {"role": "user", "content": _ASKED}
            called: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
            turns: dict[str, list[Message]] = {
                "user": [message],
                "assistant": [asked, message],
                "tool": [
                    asked,
                    called,
                    {**message, "tool_call_id": _CALL["id"], "name": _OFFERED},
                ],
            }
            text = self._probe(turns.get(role, [message, asked])) or ""
            printed = (repr(part), as_json(part), as_json(_RESULT), repr(_RESULT))
            shown = (
                _RESULT in text and _SYSTEM in text and not any(each in text for each in printed)
            )
            self._parts[role] = shown or (not self._takes_text and role != "user")
        return self._parts[role]

    @cached_property
    def _no_tools(self) -> list[Tool] | None:
        """No tools, as transformers says it, or as a template that goes through them takes it."""
        refused = self._probe([self._question()], tools=None) is None
        return [] if refused and self._probe([self._question()], tools=[]) is not None else None

    @cached_property
    def _takes_system(self) -> bool:
        system = {"role": "system", "content": self._content({"content": _SYSTEM})}
        text = self._probe([system, self._question()])
        return text is not None and _SYSTEM in text and _ASKED in text

    @cached_property
    def _way(self) -> _Way:
        ways: list[_Way] = ["tools", "xml_tools", "system"]
        texts = {}
        for way in ways:
            messages, given = self._with_tools([self._question()], [_TOOL], way)
            texts[way] = self._probe(messages, **given)
        found = [way for way in ways if _OFFERED in (texts[way] or "")]
        # A template that refuses tools says so itself.
        return found[0] if found else "tools" if texts["tools"] is None else "text"

    @cached_property
    def _form(self) -> _Form | None:
        """The form in which calls and their results are shown; None: in no form."""
        result = {"role": "tool", "tool_call_id": _CALL["id"], "name": _OFFERED}
        result["content"] = self._content({"content": _RESULT})
        messages = [self._question(), {"role": "assistant", "tool_calls": [_CALL]}, result]
        takes_tools = self._probe(messages[:1], tools=[_TOOL]) is not None
        tools = [_TOOL] if takes_tools else []
        shows_ids = _CALL["id"] in (self._probe(messages[:2], tools=tools or None) or "")
        printed = repr(_object(_ARGUMENTS)), as_json(_ARGUMENTS)
        found = []
        for form in _FORMS:
            shown, given = self._with_tools(form.of(messages), tools, self._way)
            text = self._probe(shown, **given) or ""
            if (_WANTED in text or _ARGUMENT in text or shows_ids) and _RESULT in text:
                # As Python's dictionary, or as JSON in JSON, arguments are not shown.
                good = _ARGUMENT in text and not any(each in text for each in printed)
                ids = good and shows_ids and _WANTED not in text
                found.append((not good, replace(form, names_in_ids=ids)))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _question(self) -> Message:
        return {"role": "user", "content": self._content({"content": _ASKED})}

    def _probe(self, messages: Sequence[Message], **values: Any) -> str | None:
        """The prompt; None: the template refuses."""
        try:
            return self.render(messages, {"add_generation_prompt": True, **values})
        except TemplateRefusal:
            return None


_known = lru_cache(maxsize=16)(lambda source, tokens: ChatTemplate(source, dict(tokens)))


def _attempts(messages: list[Message], form: _Form, has_calls: bool) -> list[list[Message]]:
    """Messages in the forms that a template may take, the likeliest first."""
    if not has_calls and all("content" in message for message in messages):
        return [messages]
    others = [replace(each, names_in_ids=form.names_in_ids) for each in _FORMS]
    forms = sorted(others, key=lambda each: each != form)
    return [each.of(messages) for each in forms] + [form.of(messages, empty=True)]


def _with_names_in_ids(messages: Iterable[Message]) -> list[Message]:
    """Messages whose calls have the ids of Kimi's models."""
    ids: dict[str, str] = {}
    found = []
    for message in messages:
        if calls := calls_of(message):
            for call in calls:
                ids[call.get("id", "")] = f"functions.{call['function']['name']}:{len(ids)}"
            renamed = [{**call, "id": ids[call.get("id", "")]} for call in calls]
            message = {**message, "tool_calls": renamed}
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        found.append(message)
    return found


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Messages of one call each, with its result behind it, for templates that show only one."""
    results = {m.get("tool_call_id"): m for m in messages if m["role"] == "tool"}
    found, moved = [], []
    for message in messages:
        calls = calls_of(message)
        for index, call in enumerate(calls):
            first = message if index == 0 else {"role": message["role"]}
            found.append({**first, "tool_calls": [call]})
            if call.get("id") in results:
                found.append(results[call["id"]])
                moved.append(results[call["id"]])
        if not calls and not any(message is each for each in moved):
            found.append(message)
    return found


def _tools_as_text(tools: Sequence[Tool]) -> str:
    return _HERMES_TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool in the form of OpenAI's API, or one without it."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Calls of functions in a message."""
    return message.get("tool_calls") or ()


def text_of(content: Any) -> str:
    """All text of a message's content."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return content or ""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(arguments: str) -> Any:
    """The object that is written in a text; any other text as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Messages with calls and results as text. Results have the role "user"."""
    plain: list[Message] = []
    for message in _Form().of(messages):
        calls = calls_of(message)
        message.pop("tool_calls", None)
        if message["role"] == "tool":
            answer = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
            if plain and plain[-1].get("results"):
                plain[-1]["content"] += f"\n{answer}"
            else:
                plain.append({"role": "user", "content": answer, "results": True})
            continue
        if calls or "content" not in message:
            text = text_of(message.get("content"))
            texts = [text] if text else []
            texts += [
                f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls
            ]
            message["content"] = "\n".join(texts)
        plain.append(message)
    for message in plain:
        message.pop("results", None)
    return plain


class _Generation(Extension):
    """`{% generation %}`, which marks what a model is trained to write: it changes no prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, so that what is set inside is unknown behind it.
        block = nodes.CallBlock(self.call_method("_written"), [], [], body)
        return block.set_lineno(line)

    @staticmethod
    def _written(caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without attributes that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        values = dict(*given, **values)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: use one without underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers: a sandbox with its settings, tags, filters and globals."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return found


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Renders conversations until the input ends. Each is JSON: `seconds` and the fields of
    `Conversation`; the response is the prompt, or an error."""
    import signal

    while head := source.read(HEAD.size):
        request = json.loads(source.read(HEAD.unpack(head)[0]))
        # The kernel ends a process that computes for longer.
        signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))
        try:
            prompt = Conversation(**request).render()
            response = {"text": prompt, "changes": prompt.changes}
        except TemplateRefusal as error:
            response = {"error": str(error), "param": error.param}
        except MemoryError:
            response = {"error": "the messages need too much memory", "param": "messages"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        content = json.dumps(response).encode()
        sink.write(HEAD.pack(len(content)) + content)
        sink.flush()


def _main() -> None:
    """Renders for the parent process, with as much memory as the first argument says, in bytes.

    The limits are those of POSIX systems.
    """
    import resource
    import signal

    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the input
    _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    _main()
