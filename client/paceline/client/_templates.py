"""Chat templates, rendered as transformers renders them.

A template is given what it can show. Whether it shows every message, tool and call is found by
rendering the conversation again with a word in each; its source is never looked at.

This file needs Jinja and nothing else of the project, because it is also a program: it renders the
conversations that it reads from its standard input, within limits of time and memory. See
`_chat.py`.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, reduce
from itertools import product
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = dict[str, Any]
Tool = Mapping[str, Any]

_MAX_OUTPUT = 32 << 20  # characters of a prompt
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

# A word of `_Word` in a prompt, and the quotes around it.
_SHOWN = re.compile(r"""(\\?["'])?(paceline\d+shown)(?(1)\1)""")

_Way = Literal["variable", "field", "text"]
"""How tools reach a template: in variables of the template; in the field `tools` of the system
message, as for Phi-4-mini; as text of the system message."""

_Of = Literal["message", "tool", "call", "argument"]


class _Form(NamedTuple):
    """How calls are given to a template."""

    content: Literal["missing", "none", "empty"] = "missing"  # of a message without content
    arguments: Literal["object", "text"] = "object"
    single: bool = False  # a message for each call, with its result behind it
    as_text: bool = False


_FORMS = (
    _Form(),
    _Form("none"),
    _Form("empty"),
    _Form("none", "text"),
    _Form(single=True),
    _Form(as_text=True),
)


class TemplateRefusal(ValueError):
    """A template cannot be read, or refuses a conversation. `param` is the argument at fault."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class Prompt(str):
    """A rendered conversation."""

    changes: str  # what was done to messages so that the template shows them all; "" if nothing

    def __new__(cls, text: str, changes: str) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.changes = changes
        return prompt


@dataclass(frozen=True)
class Conversation:
    """What is rendered: values of JSON. Messages and tools have the form of OpenAI's API."""

    templates: Mapping[str, str]  # of the model, by name
    messages: Sequence[Mapping[str, Any]]
    template: str | None = None  # a name, or a template; None: "tool_use" with tools, or "default"
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # variables of the template
    tools: Sequence[Tool] = ()
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # more of the template
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def render(self) -> Prompt:
        """Return the prompt, with its special tokens as text.

        Where the template refuses messages, or leaves out messages, tools or calls, they are given
        to it in other forms and orders. The first that shows all is the prompt; if none does, the
        one that leaves out the fewest messages. Raises TemplateRefusal if the template refuses
        them all, with its words about the messages as they are, or leaves out tools or calls.
        """
        template = _compiled(self._source())
        try:
            messages = [_normalized(message) for message in self.messages]
            final = self._mark_final(messages) if self.continue_final_message else ""
            marked, marked_tools, words = _with_words(messages, self.tools)
        except (LookupError, TypeError, AttributeError) as error:
            raise TemplateRefusal(
                f"messages and tools must have the form of OpenAI's API: {error!r}"
            ) from None
        refusals: list[TemplateRefusal] = []
        rendered: list[tuple[Counter[_Of], _Attempt]] = []
        hidden_ways: set[_Way] = set()
        for attempt in _attempts(marked, bool(self.tools)):
            if attempt.way in hidden_ways:
                continue
            try:
                text = self._text(template, attempt, marked, marked_tools, final)
            except TemplateRefusal as refusal:
                refusals.append(refusal)
                continue
            lost = _lost(words, text)
            rendered.append((lost, attempt))
            if not lost:
                break
            if lost["tool"] and attempt.way != "text":
                hidden_ways.add(attempt.way)
        if not rendered:
            raise refusals[0]
        lost, best = min(
            rendered, key=lambda pair: (bool(pair[0].keys() - {"message"}), pair[0].total())
        )
        if lost.keys() - {"message"}:
            raise TemplateRefusal("the chat template leaves out tools or calls of functions")
        left_out = f"the chat template leaves out {lost['message']} of the messages" if lost else ""
        text = self._text(template, best, messages, self.tools, final)
        return Prompt(text, "; ".join(filter(None, (best.changes, left_out))))

    def _text(
        self,
        template: Template,
        attempt: _Attempt,
        messages: list[Message],
        tools: Sequence[Tool],
        final: str,
    ) -> str:
        begin_answer = self.add_generation_prompt and not self.continue_final_message
        given: dict[str, Any] = {"documents": self.documents, **self.special_tokens}
        given |= {**self.variables, "tools": None, "add_generation_prompt": begin_answer}
        if tools and attempt.way == "variable":  # the first SmolLM3 has a name of its own for them
            given |= {"tools": list(tools), "xml_tools": [function_of(tool) for tool in tools]}
        text = _rendered(template, {**given, "messages": attempt.arranged(messages, tools)})
        return _up_to_tag(text, final) if self.continue_final_message else text

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
        """Put the tag behind the last message's text, which is returned."""
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
    """Return a copy of a message as templates expect it: without absent fields and empty contents
    of calls, with its reasoning under each name that templates use. Role "developer" is "system".
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields["role"] == "developer":
        fields["role"] = "system"
    if isinstance(fields.get("content"), list | tuple):
        fields["content"] = [dict(part) for part in fields["content"]]
    if calls := calls_of(fields):
        fields["tool_calls"] = [_with_arguments(call, _object) for call in calls]
        if not fields.get("content"):
            fields.pop("content", None)
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


class _Word(NamedTuple):
    """A word that no template has by itself, in a message, a tool or a call."""

    of: _Of
    word: str
    quotes: tuple[str, ...] = ()  # around a word that is printed as a part of a value


def _lost(words: Sequence[_Word], text: str) -> Counter[_Of]:
    """Count the words that a prompt does not show, by what they are of. Arguments may be missing:
    some templates show only those that the tool has."""
    quotes: dict[str, set[str]] = {}
    for shown in _SHOWN.finditer(text):
        quotes.setdefault(shown[2], set()).add(shown[1])
    return Counter(
        word.of
        for word in words
        if quotes.get(word.word, set()).intersection(word.quotes)
        or (word.word not in quotes and word.of != "argument")
    )


def _with_words(
    messages: list[Message], tools: Sequence[Tool]
) -> tuple[list[Message], list[Tool], list[_Word]]:
    """Return copies of messages and tools with a word in each text, tool and call, and the words.
    The text that is to be continued has none."""
    words: list[_Word] = []

    def new(of: _Of, *quotes: str) -> str:
        words.append(_Word(of, f"paceline{len(words)}shown", quotes))
        return words[-1].word

    def call_with_word(call: Mapping[str, Any]) -> Message:
        function = {**call["function"], "name": new("call")}
        arguments = function["arguments"]
        if isinstance(arguments, dict):
            word = new("argument", "'", '\\"')  # as Python's dictionary, or as JSON in JSON
            function["arguments"] = {**arguments, word: word}
        return {**call, "function": function}

    marked: list[Message] = []
    for message in messages:
        content = message.get("content")
        text = text_of(content)
        if text.strip() and not text.endswith(_CONTINUED):
            if isinstance(content, list):
                content = [*content, {"type": "text", "text": new("message", "'", '"')}]
            else:
                content = text + new("message")
            message = {**message, "content": content}
        if calls := calls_of(message):
            message = {**message, "tool_calls": [call_with_word(call) for call in calls]}
        marked.append(message)
    marked_tools: list[Tool] = []
    for tool in tools:
        named = {**function_of(tool), "name": new("tool")}
        marked_tools.append({**tool, "function": named} if "function" in tool else named)
    return marked, marked_tools, words


class _Attempt(NamedTuple):
    """How messages and tools are given to a template."""

    way: _Way
    form: _Form
    steps: tuple[Callable[[list[Message]], list[Message]], ...]  # to another order
    flat: bool  # lists of parts become texts
    changes: str  # what the steps do, in words

    def arranged(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return the messages as the template gets them, with the tools that are no variable."""
        messages = _prepared(messages, tools, self.way, self.form)
        messages = reduce(lambda arranged, step: step(arranged), self.steps, messages)
        messages = _one_call_each(messages) if self.form.single else messages
        return [_in_form(message, self.form, self.flat) for message in messages]


def _attempts(messages: list[Message], has_tools: bool) -> Iterator[_Attempt]:
    """Return what is tried for a conversation, the likeliest first, each once."""
    has_calls = any(calls_of(m) or m["role"] == "tool" or "content" not in m for m in messages)
    has_lists = any(isinstance(message.get("content"), list) for message in messages)
    ways: tuple[_Way, ...] = ("variable", "field", "text") if has_tools else ("variable",)
    kinds = [(way, _FORMS[-1:] if has_calls else _FORMS[:1]) for way in ways]
    # What shows no tools shows no calls, or none in the form that the text about tools explains.
    for way, forms in [("variable", _FORMS[:-1]), *kinds] if has_calls else kinds:
        tried: list[list[Message]] = []
        start = _prepared(messages, [{}] * has_tools, way, forms[0])
        bare = _prepared(messages, (), way, forms[0])  # without tools, whose place is free
        for steps in _ARRANGEMENTS:
            arranged, told = start, bare
            # Beside tools in the template's own form.
            apart = has_tools and way == "variable" and forms[0].as_text
            changes = ["calls became text"] * apart
            for step in steps:
                before, arranged, told = told, step(arranged), step(told)
                changes += [_STEPS[step]] if told != before else []
            if arranged not in tried:
                tried.append(arranged)
                for form, flat in product(forms, (False, True) if has_lists else (False,)):
                    yield _Attempt(way, form, steps, flat, "; ".join(changes))


def _prepared(
    messages: list[Message], tools: Sequence[Tool], way: _Way, form: _Form
) -> list[Message]:
    """Return messages with calls as text, if the form says so, and the tools in a system message,
    if the way says so."""
    messages = _calls_as_text(messages) if form.as_text else messages
    if not tools or way == "variable":
        return messages
    first: Message = {"role": "system"}
    if messages and messages[0]["role"] == "system":
        first, messages = messages[0], messages[1:]
    if way == "field":
        described = as_json([function_of(tool) for tool in tools])
        return [{"content": "", **first, "tools": described}, *messages]
    text = _HERMES_TOOLS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    return [
        {**first, "content": "\n\n".join(filter(None, (text_of(first.get("content")), text)))},
        *messages,
    ]


def _in_form(message: Message, form: _Form, flat: bool) -> Message:
    """Return a message in the form that a template may take."""
    message = dict(message)
    if "content" not in message and form.content != "missing":
        message["content"] = None if form.content == "none" else ""
    if flat and isinstance(message.get("content"), list):
        message["content"] = text_of(message["content"])
    if form.arguments == "text" and (calls := calls_of(message)):
        message["tool_calls"] = [_with_arguments(call, _as_text) for call in calls]
    return message


def _with_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


def _system_first(messages: list[Message]) -> list[Message]:
    first = [message for message in messages if message["role"] == "system"]
    return _merged(first) + [message for message in messages if message["role"] != "system"]


def _system_as_user(messages: list[Message]) -> list[Message]:
    return [{**m, "role": "user"} if m["role"] == "system" else m for m in messages]


def _alternating(messages: list[Message]) -> list[Message]:
    """Return messages whose turns of user and assistant alternate, beginning with the user's.

    A result without a call is the user's. Turns that are missing are added, with a space, since
    templates refuse empty ones.
    """
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
    """Return messages without text beside calls: it is a message before them."""
    apart: list[Message] = []
    for message in messages:
        if calls_of(message) and message.get("content"):
            apart.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "tool_calls": message["tool_calls"]}
        apart.append(message)
    return apart


def _merged(messages: list[Message]) -> list[Message]:
    """Return messages, where consecutive ones of one role are merged.

    Calls, and what is behind them, are kept apart.
    """
    groups: list[list[Message]] = []
    for message in messages:
        last = groups[-1][-1] if groups else {"role": ""}
        if last["role"] != message["role"] or message["role"] == "tool" or calls_of(last):
            groups.append([])
        groups[-1].append(message)
    return [_as_one(group) if len(group) > 1 else group[0] for group in groups]


def _as_one(messages: list[Message]) -> Message:
    contents = [message["content"] for message in messages if message.get("content")]
    joined: Any = "\n\n".join(text for text in contents if isinstance(text, str))
    if any(isinstance(value, list) for value in contents):
        joined = [
            part
            for value in contents
            for part in (value if isinstance(value, list) else [{"type": "text", "text": value}])
        ]
    return {name: value for m in messages for name, value in m.items()} | {"content": joined}


_STEPS: dict[Callable[[list[Message]], list[Message]], str] = {
    _system_first: "system messages were merged into the first one",
    _alternating: "turns were merged or added so that user and assistant alternate",
    _system_as_user: "system messages became the user's",
    _apart: "texts beside calls became messages of their own",
}
_ARRANGEMENTS = (
    (),
    (_system_first,),
    (_system_first, _alternating),
    (_system_as_user, _alternating),
    (_apart,),
    (_system_as_user, _alternating, _apart),
)


def _up_to_tag(text: str, final: str) -> str:
    """Return a rendered conversation up to the tag behind its last message. White space at the end
    is the message's where the template keeps it."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateRefusal(
            "the last message cannot be continued: the template leaves its text out, or a part",
            "continue_final_message",
        )
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


def _rendered(template: Template, values: Mapping[str, Any]) -> str:
    """Return a prompt. Raises TemplateRefusal if the template does not make one."""
    pieces, size = [], 0
    try:
        for piece in template.generate(values):
            size += len(piece)
            if size > _MAX_OUTPUT:
                raise TemplateRefusal(f"its text is longer than {_MAX_OUTPUT} characters")
            pieces.append(piece)
    except Exception as error:  # a template may raise anything
        refused = f"{error}" or type(error).__name__
        raise TemplateRefusal(f"the chat template refuses these messages: {refused}") from None
    return "".join(pieces)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except (TemplateError, RecursionError) as error:
        raise TemplateRefusal(f"the chat template cannot be read: {error}") from None


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return messages of one call each, with its result behind it."""
    results = {m.get("tool_call_id"): m for m in messages if m["role"] == "tool"}
    single, moved = [], []
    for message in messages:
        calls = calls_of(message)
        for index, call in enumerate(calls):
            first = message if index == 0 else {"role": message["role"]}
            single.append({**first, "tool_calls": [call]})
            if call.get("id") in results:
                single.append(results[call["id"]])
                moved.append(results[call["id"]])
        if not calls and not any(message is result for result in moved):
            single.append(message)
    return single


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool, or the tool itself, which some clients send without type."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return content or ""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else as_json(arguments)


def _object(arguments: Any) -> Any:
    """Return the object that is written in a text; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages with calls and results as text in the form of the Hermes models. Results have
    the role "user"."""
    plain: list[Message] = []
    for message in map(dict, messages):
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
    """Return transformers' environment: a sandbox with its settings, tags, filters and globals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Render conversations until the input ends. Each is JSON: `seconds` and the fields of
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
    """Render for the parent process, with as much memory as the first argument says, in bytes.

    Such limits exist on POSIX systems alone.
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
