"""Calls of functions in the text of a model.

Between marks, which are special tokens of some models and text of others: JSON (Hermes, Qwen,
SmolLM, Granite, Phi-4-mini, Command R, Nemotron, Apertus, ...), a name and JSON (Mistral, DeepSeek,
Kimi, Hunyuan), tags for each argument (Qwen3-Coder, GLM-4.5) or a call in Python's form (LFM2,
Llama 4). From the start of the text on also without marks: JSON (Llama 3, Mistral), Python's form,
or a tool's name with JSON on the next line (GLM-4). The marks tell the form, so that no model needs
an option.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .requests import ToolUse

# Each mark that calls begin with, and the one that ends them; "": the next one, or the end.
_BLOCKS = {
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<seed:tool_call>": "</seed:tool_call>",
    "<function_calls>": "</function_calls>",
    "<function=": "</function>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<|tool_call_begin|>": "<|tool_call_end|>",
    "<|tools_prefix|>": "<|tools_suffix|>",
    "<|action_start|>": "<|action_end|>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|python_start|>": "<|python_end|>",
    "<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>",
    "<|python_tag|>": "",
    "[TOOL_CALLS]": "",
}
# What stands around several calls, or between the parts of one.
_AROUND = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
# What some models write behind a call that had no beginning; text where there was no call.
_STRAY = ("</tool_call>", "</tool_calls>")
_WITHIN = (
    *("<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]", "[CALL_ID]", "<|plugin|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
CALL_MARKS = frozenset({*_BLOCKS, *_BLOCKS.values(), *_AROUND, *_WITHIN} - {"", "<function="})
"""Special tokens that the text must have for its calls to be read."""

_OPENING = (*_BLOCKS, *_AROUND, *_STRAY)
_MARK = re.compile("|".join(map(re.escape, _OPENING)))
# Phi-4-mini's form, at the start of a text.
_FUNCTOOLS = "functools["
# What stands before, between and after the objects of calls.
_SEPARATORS = " \n\r\t,;[]"
# The keys that an object of a call may begin with.
_KEYS = ("name", "arguments", "parameters", "type", "function", "id", "tool_name", "tool_call_id")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_NAME_AND_JSON = re.compile(
    r"(?:function<｜tool▁sep｜>)?(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?\s*"
    r"(?:\[CALL_ID\]\s*\w+\s*)?(?:(?:\[ARGS\]|<｜tool▁sep｜>|<\|tool_call_argument_begin\|>"
    r"|```(?:json)?)\s*)*(?=\{)"
)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL)
_JSON_CALL = re.compile(r"[\s\[]*\{")
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)
_LETTERS = string.ascii_letters + string.digits
_CONSTANTS = {"true": True, "false": False, "null": None}
# Longest call in Python's form. Unit: characters.
_LONGEST_PYTHON = 1 << 16


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


# Texts may have line breaks, as models write them. Numbers must be those of JSON.
_DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=_number)


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """JSON as text."""
    id: str = field(default_factory=lambda: "".join(secrets.choice(_LETTERS) for _ in range(9)))
    """9 letters and digits: templates of Mistral's models take no other."""


@dataclass(frozen=True)
class Reasoning:
    """What a model thought."""

    text: str


Part = str | Call | Reasoning
"""A part of an answer."""


def undecided(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of a text that may begin a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


class CallParser:
    """Separates calls from the other text, while it streams.

    A call is reported when it is complete. Text that turns out to be no call is passed on, without
    the marks that are special tokens (`special`).
    """

    def __init__(self, use: ToolUse, special: frozenset[str] = frozenset()) -> None:
        self._use = use
        self._special = special
        self._left = ""
        self._mark = ""
        self._space = ""  # before the mark
        self._within = 0  # the last place of the open block that is within a text of its call
        # "all": no calls are looked for; "named": the text is arguments; "start": before the first
        # character; "text"; "block" and "json": among calls.
        self._state = {"none": "all", "named": "named"}.get(use.mode, "start")
        self.calls = 0
        """Number of calls so far."""

    def push(self, text: str) -> list[Part]:
        """The parts that became final with more text, in order."""
        if self._state == "all":
            return [text] if text else []
        self._left += text
        return [] if self._state == "named" else list(self._read())

    def flush(self) -> list[Part]:
        """The rest, when no text follows."""
        if self._state == "named":
            return [self.made(self._use.name, self._left)]
        parts = list(self._read(final=True))
        if self._state == "json" and not self.calls:
            parts += self._reported(_in_python(self._left, self._use))
            self._left = "" if self.calls else self._left
        rest, self._left = self._left, ""
        if self._state == "json" and self.calls:
            rest = re.sub("|".join(_STRAY), "", rest)
        if rest.strip(_SEPARATORS) or (rest and not self.calls):
            parts.append(rest)
        return parts

    def made(self, name: str, arguments: str) -> Call:
        """A call that is counted."""
        self.calls += 1
        known = name.removeprefix("functions.")
        # Halves of characters are no text that could be sent.
        name, arguments = (
            text.encode(errors="replace").decode()
            for text in (known if known in self._use.names else name, arguments)
        )
        return Call(name, arguments)

    def _read(self, *, final: bool = False) -> Iterator[Part]:
        if self._state == "start":
            stripped = self._left.lstrip()
            names = [f"{name}\n{{" for name in self._use.names]
            if any(
                len(stripped) < len(each) and each.startswith(stripped)
                for each in [_FUNCTOOLS, *names]
            ):
                return
            self._state = "json" if stripped[0] in "[{" else "text"
            if stripped.startswith(tuple(names)):
                self._state, self._space = "block", self._left[: -len(stripped)]
                self._left = stripped
            elif stripped.startswith(_FUNCTOOLS):
                self._state, self._mark, self._left = "block", "functools", stripped[9:]
        if self._state == "json":
            yield from self._objects()
            if self.calls or self._may_be_call():
                return
            self._state = "text"  # JSON that is no call
        while self._state in ("text", "block"):
            if self._state == "block":
                if (split := self._split(final)) is None:
                    return
                inside, end, self._left = split
                self._state, self._within = "text", 0
                yield from self._block(inside, end)
                continue
            found = _MARK.search(self._left)
            if found is None:
                end_of_text = len(self._left) - undecided(self._left, _OPENING)
                text = self._left[:end_of_text].rstrip()
                self._left = self._left[len(text) :]
                if text:
                    yield text
                return
            before, self._left = self._left[: found.start()], self._left[found.end() :]
            if found[0] in _STRAY and not self.calls:
                yield before + found[0]
                continue
            if text := before.rstrip():
                yield text
            self._space = before[len(text) :]
            if found[0] in _BLOCKS:
                self._state, self._mark = "block", found[0]

    def _split(self, final: bool) -> tuple[str, str, str] | None:
        """The open block, the mark that ends it, and the text behind; None: it is not complete."""
        end = _BLOCKS.get(self._mark, "")
        marks = re.compile(re.escape(end)) if end else _MARK
        for found in marks.finditer(self._left, self._within):
            if not self._is_within(found.start()):
                break
            self._within = found.start()
        else:
            if not final:
                return None
            first = marks.search(self._left) if self._within else None
            calls, rest = _calls_in(self._left, self._use)
            if first is None or (calls and not rest.strip(_SEPARATORS)):
                return self._left, "", ""
            found = first  # it ends a damaged call
        behind = found.end() if end else found.start()
        return self._left[: found.start()], end, self._left[behind:]

    def _is_within(self, at: int) -> bool:
        """Whether a mark at a place of the open block is within a text of its call. Such marks end
        nothing."""
        before = self._left[:at]
        if _JSON_CALL.match(before) or _NAME_AND_JSON.match(before.lstrip(_SEPARATORS)):
            within = self._within > 0
            for found in _QUOTE.finditer(before, self._within):
                within ^= found[0] == '"'
            return within
        if before.lstrip().startswith("<function="):
            return not before.rstrip().endswith(("</function>", "</parameter>"))
        return "<arg_key>" in before and not before.rstrip().endswith("</arg_value>")

    def _block(self, inside: str, end: str) -> Iterator[Part]:
        """The calls of a block, or its text if it has none."""
        whole = self._mark + inside + end
        calls, rest = _calls_in(whole if self._mark == "<function=" else inside, self._use)
        yield from self._reported(calls)
        if rest.strip(_SEPARATORS + "}" * bool(calls)):
            text = self._space + (self._mark + rest if calls else whole)
            for mark in self._special:
                text = text.replace(mark, "")
            if text:
                yield text

    def _reported(self, calls: list[tuple[str, str]]) -> Iterator[Part]:
        for name, arguments in calls:
            if self.calls == 0 or self._use.parallel:
                yield self.made(name, arguments)

    def _objects(self) -> Iterator[Part]:
        """Takes complete objects of calls off the front of a text without marks."""
        calls, self._left = _objects_in(self._left, self._use.names, only_known=True)
        yield from self._reported(calls)

    def _may_be_call(self) -> bool:
        """Whether text that begins like JSON may still become a call."""
        rest = self._left.lstrip(_SEPARATORS)
        for name in self._use.names:
            called = f"{name}("
            if rest and (called.startswith(rest) or rest.startswith(called)):
                return self._left.lstrip().startswith("[")
        try:
            _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            key = _FIRST_KEY.match(rest)
            return not rest or (rest[0] == "{" and (key is None or key[1] in _KEYS))
        return False


def _calls_in(text: str, use: ToolUse) -> tuple[list[tuple[str, str]], str]:
    """Names and arguments of the calls in a block, and the text that is none."""
    text = text.replace("<|plugin|>", "")
    if text.strip() in use.names:
        return [(text.strip(), "{}")], ""
    fenced = _FENCED.fullmatch(text)
    text = fenced[1] if fenced else text
    calls, rest = _objects_in(text, use.names, only_known=False)
    if calls or not rest.strip(_SEPARATORS):
        return calls, rest
    if "<function=" in text:
        for name, body in _FUNCTION.findall(text):
            calls.append((name.strip(), _function_arguments(name.strip(), body, use)))
        return calls, "" if calls else text
    if "<arg_key>" in text:
        name = text.partition("<arg_key>")[0].strip()
        return [(name, _typed(name, dict(_PAIR.findall(text)), use))], ""
    if found := _named_objects_in(text):
        return found, ""
    inner = [part for part in re.split(r"</?tool_call>", text) if part.strip()]
    if len(inner) > 1 or "<tool_call>" in text:
        parts = [_calls_in(part, use) for part in inner]
        return [call for part, _ in parts for call in part], "".join(rest for _, rest in parts)
    calls = _in_python(text, use)
    return calls, "" if calls else text


def _objects_in(
    text: str, names: frozenset[str], *, only_known: bool
) -> tuple[list[tuple[str, str]], str]:
    """Calls that are JSON at the front of a text, and the rest. Without a mark, an object with
    another name than a tool's may be an answer (`only_known`)."""
    calls: list[tuple[str, str]] = []
    while True:
        rest = text.lstrip(_SEPARATORS)
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return calls, text
        call = _as_call(value, names)
        if call is None or (only_known and call[0] not in names):
            return calls, text
        calls.append(call)
        text = rest[end:]


def _as_call(value: Any, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of an object; None if it is no call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    if isinstance(name, str):
        arguments = value.get("arguments", value.get("parameters", {}))
    elif len(value) == 1 and names.issuperset(value):
        ((name, arguments),) = value.items()
    else:
        return None
    if arguments is None:
        arguments = {}
    return name, arguments if isinstance(arguments, str) else _as_json(arguments)


def _named_objects_in(text: str) -> list[tuple[str, str]]:
    """Calls that are a name and JSON; empty if something else is there."""
    calls = []
    rest = text.strip(_SEPARATORS)
    while rest:
        found = _NAME_AND_JSON.match(rest)
        if found is None:
            return []
        try:
            value, end = _DECODER.raw_decode(rest, found.end())
        except (ValueError, RecursionError):
            return []
        calls.append((found["name"], _as_json(value)))
        rest = rest[end:].strip(_SEPARATORS).removeprefix("```").strip(_SEPARATORS)
    return calls


def _function_arguments(name: str, body: str, use: ToolUse) -> str:
    """Arguments in tags, or JSON."""
    if not _PARAMETER.search(body):
        try:
            return _as_json(_DECODER.decode(body)) if body.strip() else "{}"
        except (ValueError, RecursionError):
            return "{}"
    pairs = {key.strip(): value for key, value in _PARAMETER.findall(body)}
    # A value is on lines of its own.
    lines = {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs.items()}
    return _typed(name, lines, use)


def _typed(name: str, pairs: Mapping[str, str], use: ToolUse) -> str:
    """Arguments as JSON. A value that is no JSON, or that the function takes as text, is text."""
    schemas = [
        tool.function.parameters.get("properties")
        for tool in use.tools
        if tool.function.name == name
    ]
    known: Any = schemas[0] if schemas and isinstance(schemas[0], dict) else {}
    values: dict[str, Any] = {}
    for key, text in pairs.items():
        schema = known.get(key)
        if isinstance(schema, dict) and schema.get("type") == "string":
            values[key] = text
            continue
        try:
            values[key] = _DECODER.decode(text)
        except (ValueError, RecursionError):
            values[key] = text
    return _as_json(values)


def _in_python(text: str, use: ToolUse) -> list[tuple[str, str]]:
    """Calls of tools in Python's form, `[f(a=1), g()]`; empty if it is something else."""
    text = text.strip().rstrip(";")
    if len(text) > _LONGEST_PYTHON or not any(name in text for name in use.names):
        return []
    try:
        calls = []
        for line in ast.parse(text).body:
            value = line.value if isinstance(line, ast.Expr) else None
            nodes = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            calls += [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls if all(name in use.names for name, _ in calls) else []


class _Constants(ast.NodeTransformer):
    """Replaces the constants of JSON by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _python_call(node: ast.expr | None) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func).removesuffix(".call")
    values = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("no named argument")
        values[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
    return name, _as_json(values)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
