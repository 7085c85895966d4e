"""Calls of functions in the text of a model.

Between marks, which are special tokens of some models and text of others: JSON (Hermes, Qwen,
SmolLM, Granite, Phi-4-mini), a name and JSON (Mistral), tags for each argument (Qwen3-Coder,
GLM-4.5) or a call in Python's form (Olmo 3). From the start of the text on also without marks: JSON
(Llama 3, Mistral), Python's form (Llama 3.2), or a tool's name with JSON on the next line (GLM-4).
The marks tell the form, so that no model needs an option.

Thoughts have no calls. A call is complete with its end mark, or with the last bracket of its JSON
or Python; what is cut off before is text.
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
from .tool_schemas import ANY_TYPE, TYPES, types_of

BLOCKS = {
    "<tool_call>": "</tool_call>",
    "<function_calls>": "</function_calls>",
    "<function=": "</function>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|python_tag|>": "",
    "[TOOL_CALLS]": "",
}  # each mark that calls begin with, and the one that ends them; "": the next one, or the end
# What some models write behind a call that had no beginning; text where there was no call.
_STRAY = "</tool_call>"
# What stands between the parts of a call.
_WITHIN = ("[ARGS]", "[CALL_ID]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
CALL_MARKS = frozenset({*BLOCKS, *BLOCKS.values(), *_WITHIN} - {"", "<function="})
"""Special tokens that the text must have for its calls to be read."""

THOUGHTS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
"""What thoughts begin with, and the mark that ends them."""
THOUGHT_MARKS = frozenset({*THOUGHTS, *THOUGHTS.values()})
"""Special tokens that the text must have for its thoughts to be told from the rest."""

_OPENING = (*BLOCKS, _STRAY, *THOUGHTS)
_UNDECIDED = (*_OPENING, *THOUGHTS.values())
_MARK = re.compile("|".join(map(re.escape, _OPENING)))
_THOUGHT_MARK = re.compile("|".join(map(re.escape, THOUGHT_MARKS)))
_THOUGHT_END = re.compile("|".join(map(re.escape, THOUGHTS.values())))
FUNCTOOLS = "functools["  # the form of Phi-4-mini, at the start of a text
_SEPARATORS = " \n\r\t,;[]"  # what stands before, between and after the objects of calls
# The keys that an object of a call may begin with.
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_NAME_AND_JSON = re.compile(
    r"(?:functions\.)?(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
# The end of a value is followed by another tag: other marks of ends are a part of it.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>(?=\s*(?:<parameter=[^>\s]+>|</function>|\Z))"
    r"|(?=\n<parameter=[^>\s]+>))",
    re.DOTALL,
)
_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_JSON_CALL = re.compile(r"(?:<function=[^>\n]+>)?\s*\{")
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)
_LETTERS = string.ascii_letters + string.digits
_CONSTANTS = {"true": True, "false": False, "null": None}
_WORDS = {**_CONSTANTS, "True": True, "False": False, "None": None}
_MAX_PYTHON = 1 << 16  # maximum length of a call or value in Python's form, in characters


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


# Texts may have line breaks, as models write them. Numbers must be those of JSON.
_DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=_number)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON as text
    id: str = field(default_factory=lambda: "".join(secrets.choice(_LETTERS) for _ in range(9)))
    """9 letters and digits: templates of Mistral's models take no other."""


@dataclass(frozen=True)
class Reasoning:
    text: str


Part = str | Call | Reasoning  # a part of an answer


def undecided(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of a text that may begin a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next(
        (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


def end_of_open_thought(prompt: str, continued: str = "") -> str:
    """The mark that ends the thought in which a prompt ends; empty: in none. `continued` is the
    text of its last message if the answer goes on with that."""
    for opening, end in THOUGHTS.items():
        if prompt.rstrip().endswith(opening) or continued.rfind(opening) > continued.rfind(end):
            return end
    return ""


class CallParser:
    """Separates calls from the other text, while it streams.

    A call is reported when it is complete. Text that turns out to be no call is passed on, without
    the marks that are special tokens (`special`).

    A thought is a part of the text, or `Reasoning` beside an answer that has a format. It begins
    with a mark at the start of a line, or, if `in_thought`, with the text. Calls wait where the
    text may be one: behind a mark elsewhere in a line, and from the start on if `in_thought` is
    None. They are none if the end of a thought follows.
    """

    def __init__(
        self, use: ToolUse, special: frozenset[str] = frozenset(), in_thought: bool | None = None
    ) -> None:
        self._use = use
        self._special = special
        self._left = ""
        self._mark = ""
        self._space = ""  # before the mark
        self._within = 0  # the last place of the open block that is within a text of its call
        self._line = ""  # what was passed on of this line
        # "all": no calls are looked for; "named": the text is arguments; "thought"; "start": before
        # the first character; "text"; "block" and "json": among calls.
        begin = "thought" if in_thought and use.mode == "auto" else "start"
        self._state = {"none": "all", "named": "named"}.get(use.mode, begin)
        self._unsure = in_thought is None and use.mode == "auto"
        self._seen = ""  # text since it is not sure
        self._begun = 0  # the place there of the first call that waits
        self._waiting: list[Part] = []
        self.calls = 0  # number of calls so far

    def push(self, text: str) -> list[Part]:
        """The parts that became final with more text, in order."""
        if self._state == "all":
            return [text] if text else []
        self._left += text
        self._seen += text if self._unsure else ""
        return [] if self._state == "named" else list(self._sure(self._read()))

    def flush(self) -> list[Part]:
        if self._state == "named" and _is_json(self._left):
            return [self.made(self._use.name, self._left)]
        parts = list(self._sure(self._read(final=True)))
        parts, self._waiting = self._waiting + parts, []
        if self._state == "json" and not self.calls:
            parts += self._reported(_in_python(self._left, self._use))
            self._left = "" if self.calls else self._left
        rest, self._left = self._left, ""
        if rest.strip(_SEPARATORS) or (rest and not self.calls):
            parts.append(rest)
        return parts

    def made(self, name: str, arguments: str) -> Call:
        self.calls += 1
        known = name.removeprefix("functions.")
        # Halves of characters are no text that could be sent.
        name, arguments = (
            text.encode(errors="replace").decode()
            for text in (known if known in self._use.names else name, arguments)
        )
        return Call(name, arguments)

    def _sure(self, parts: Iterator[Part]) -> Iterator[Part]:
        """The parts that are final, without empty ones; the others wait."""
        for part in parts:
            if part == "":
                continue
            if isinstance(part, str):
                self._line = (self._line + part).rpartition("\n")[2]
            if self._unsure and (self._waiting or isinstance(part, Call)):
                self._waiting.append(part)
            else:
                yield part

    def _read(self, *, final: bool = False) -> Iterator[Part]:
        while self._state != "named":
            if (end := self._end_of_thought()) is not None:
                yield from self._taken_back(end)
            elif self._state == "thought":
                found = _THOUGHT_END.search(self._left)
                kept = 0 if final else undecided(self._left, tuple(THOUGHT_MARKS))
                end = found.end() if found else len(self._left) - kept
                thought, self._left = self._left[:end], self._left[end:]
                yield from self._thought(thought)
                if found is None:
                    return
                self._state, self._mark, self._line = "start", found[0], ""
            elif self._state == "start":
                stripped = self._left.lstrip()
                if self._mark:  # space behind a thought belongs to it
                    space, self._left = self._left[: len(self._left) - len(stripped)], stripped
                    yield "" if self._use.bound else space
                if not self._started():
                    return
            elif self._state == "json":
                calls, self._left = _objects_in(self._left, self._use.names, only_known=True)
                yield from self._reported(calls)
                if self._may_be_call():
                    return
                self._state = "text"
            elif self._state == "block":
                if (split := self._split(final)) is None:
                    return
                inside, end_mark, self._left, ended = split
                self._state, self._within, self._line = "text", 0, ""
                yield from self._block(inside, end_mark, ended)
            elif found := _MARK.search(self._left):
                yield from self._open(found)
            else:
                text = self._left[: len(self._left) - undecided(self._left, _UNDECIDED)].rstrip()
                self._left = self._left[len(text) :]
                yield text
                return

    def _started(self) -> bool:
        """Finds the form at the start of a text; False: more of it is needed."""
        stripped = self._left.lstrip()
        names = [f"{name}\n{{" for name in self._use.names]
        if any(
            len(stripped) < len(each) and each.startswith(stripped) for each in [FUNCTOOLS, *names]
        ):
            return False
        self._begun = len(self._seen) - len(self._left)
        self._state, self._mark = "json" if stripped[0] in "[{" else "text", ""
        if stripped.startswith(tuple(names)):
            self._state, self._space = "block", self._left[: -len(stripped)]
            self._left = stripped
        elif stripped.startswith(FUNCTOOLS):
            self._state, self._mark, self._left = "block", "functools", stripped[9:]
        return True

    def _open(self, found: re.Match[str]) -> Iterator[Part]:
        """Goes on behind a mark in a text; what is before it is final."""
        before, mark = self._left[: found.start()], found[0]
        text = before.rstrip()
        if not self._waiting:
            self._begun = len(self._seen) - len(self._left) + len(text)
        self._left = self._left[found.end() :]
        begins_line = not (self._line + before).rpartition("\n")[2].strip()
        if mark in THOUGHTS and (begins_line or self._use.bound):
            yield from self._settled()
            yield text if self._use.bound else before
            self._state, self._left = "thought", mark + self._left
        elif mark in THOUGHTS:
            if not self._unsure:
                self._unsure, self._seen = True, self._left
            yield before
            yield from self._thought(mark)
        elif mark == _STRAY and not self.calls:
            yield before + mark
        else:
            yield text
            self._space = before[len(text) :]
            if mark in BLOCKS:
                self._state, self._mark = "block", mark

    def _end_of_thought(self) -> int | None:
        """Where a thought ends that the text may be, outside the texts of calls."""
        among_calls = self._state in ("block", "json")
        for found in _THOUGHT_MARK.finditer(self._left) if self._unsure else ():
            if not (among_calls and self._is_within(found.start())):
                return None if found[0] in THOUGHTS else found.end()
        return None

    def _taken_back(self, end: int) -> Iterator[Part]:
        """What turned out to be a thought, up to this end. Calls in it are none."""
        place = len(self._seen) - len(self._left)
        begun = self._begun if self._waiting or self._state == "block" else place
        thought = self._seen[begun : place + end]
        self.calls -= sum(isinstance(part, Call) for part in self._waiting)
        self._waiting.clear()
        self._unsure, self._left, self._within = False, self._left[end:], 0
        yield from self._thought(thought)
        self._state, self._mark, self._line = "start", thought, ""

    def _settled(self) -> Iterator[Part]:
        """What waited, since a thought begins here, and so none was before."""
        self._unsure, waiting, self._waiting = False, self._waiting, []
        yield from waiting

    def _thought(self, text: str) -> Iterator[Part]:
        for mark in THOUGHT_MARKS if self._use.bound else THOUGHT_MARKS & self._special:
            text = text.replace(mark, "")
        if text:
            yield Reasoning(text) if self._use.bound else text

    def _split(self, final: bool) -> tuple[str, str, str, bool] | None:
        """The open block, the mark that ends it, the text behind it, and whether it has an end;
        None: that may still come."""
        end = BLOCKS.get(self._mark, "")
        marks = re.compile(re.escape(end)) if end else _MARK
        ended = True
        for found in marks.finditer(self._left, self._within):
            if not self._is_within(found.start()):
                break
            self._within = found.start()
        else:
            if not final:
                return None
            ended = False
            first = marks.search(self._left) if self._within else None
            calls, rest = _calls_in(self._block_text(self._left), self._use, ended)
            if first is None or (calls and not rest.strip(_SEPARATORS)):
                return self._left, "", "", ended
            found = first  # it ends a damaged call
        behind = found.end() if end else found.start()
        return self._left[: found.start()], end, self._left[behind:], ended

    def _block_text(self, inside: str) -> str:
        return self._mark + inside if self._mark == "<function=" else inside

    def _is_within(self, at: int) -> bool:
        """Whether a mark at a place of the open block is within a text of its call. Such marks end
        nothing."""
        before = self._left[:at]
        call = self._block_text(before).lstrip(_SEPARATORS)
        if _JSON_CALL.match(call) or _NAME_AND_JSON.match(call):
            within = self._within > 0
            for found in _QUOTE.finditer(before, self._within):
                within ^= found[0] == '"'
            return within
        if call.startswith("<function="):
            body = call.rstrip().removesuffix("</function>").rstrip()
            return "<parameter=" in body and not body.endswith("</parameter>")
        return "<arg_key>" in before and not before.rstrip().endswith("</arg_value>")

    def _block(self, inside: str, end: str, ended: bool) -> Iterator[Part]:
        """The calls of a block, or its text if it has none."""
        whole = self._mark + inside + end
        in_tags = self._mark == "<function="
        calls, rest = _calls_in(whole if in_tags else inside, self._use, ended)
        yield from self._reported(calls)
        if rest.strip(_SEPARATORS + "}" * bool(calls)):
            text = self._space + (whole if not calls else rest if in_tags else self._mark + rest)
            for special in self._special:
                text = text.replace(special, "")
            yield text

    def _reported(self, calls: list[tuple[str, str]]) -> Iterator[Part]:
        for name, arguments in calls:
            if self.calls == 0 or self._use.parallel:
                yield self.made(name, arguments)

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


def _calls_in(text: str, use: ToolUse, ended: bool) -> tuple[list[tuple[str, str]], str]:
    """Names and arguments of the calls in a block, and the text that is none. Without an end of the
    block (`ended`), calls are those that have an end of their own."""
    if text.strip() in use.names:
        return ([(text.strip(), "{}")], "") if ended else ([], text)
    fenced = _FENCED.fullmatch(text)
    text = fenced[1] if fenced else text
    calls, rest = _objects_in(text, use.names, only_known=False)
    if calls or not rest.strip(_SEPARATORS):
        return calls, rest
    if "<function=" in text:
        return _functions_in(text, use, ended)
    if "<arg_key>" in text:
        return _pairs_in(text, use) if ended else ([], text)
    calls = _named_objects_in(text) or _in_python(text, use)
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
        call = _as_call(value)
        if call is None or (only_known and call[0] not in names):
            return calls, text
        calls.append(call)
        text = rest[end:]


def _as_call(value: Any) -> tuple[str, str] | None:
    """Name and arguments of an object; None if it is no call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str):
        return None
    arguments = {} if arguments is None else arguments
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
        rest = rest[end:].strip(_SEPARATORS)
    return calls


def _functions_in(text: str, use: ToolUse, ended: bool) -> tuple[list[tuple[str, str]], str]:
    """Calls whose arguments are in tags, or JSON, and the text from the first damaged one on."""
    calls: list[tuple[str, str]] = []
    rest = text
    while found := _FUNCTION.search(rest):
        name, pairs, at = found[1].strip(), dict[str, str](), found.end()
        while parameter := _PARAMETER.match(rest, at):
            # A value is on lines of its own.
            pairs[parameter[1].strip()] = parameter[2].removeprefix("\n").removesuffix("\n")
            at = parameter.end()
        arguments = _typed(name, pairs, use)
        if not pairs and rest.startswith("{", at):
            try:
                value, at = _DECODER.raw_decode(rest, at)
            except (ValueError, RecursionError):
                break
            arguments = _as_json(value)
        between, end, behind = rest[at:].partition("</function>")
        if between.strip() or not (end or ended):
            break
        calls.append((name, arguments))
        rest = behind
    return calls, "" if calls and "<function=" not in rest else rest


def _pairs_in(text: str, use: ToolUse) -> tuple[list[tuple[str, str]], str]:
    """The call of a name with pairs of keys and values, and the text if it is damaged."""
    name, pairs, at = text.partition("<arg_key>")[0], dict[str, str](), text.index("<arg_key>")
    while pair := _PAIR.match(text, at):
        pairs[pair[1].strip()], at = pair[2], pair.end()
    if text[at:].strip():
        return [], text
    return [(name.strip(), _typed(name.strip(), pairs, use))], ""


def _typed(name: str, pairs: Mapping[str, str], use: ToolUse) -> str:
    """Arguments as JSON, each with a type that the function's schema allows."""
    schemas = [tool.function.parameters for tool in use.tools if tool.function.name == name]
    schema = schemas[0] if schemas else {}
    return _as_json({key: _value(text, types_of(schema, key)) for key, text in pairs.items()})


def _value(text: str, types: frozenset[str]) -> Any:
    """The value that a text in tags stands for, where these types are allowed.

    It is what the text is in JSON or Python, if that type is allowed, and else the text. So "5" is
    a number where both a number and a string are allowed. Quotes around a string are a part of it,
    unless all types are allowed. A text that is of no allowed type is what it is in JSON.
    """
    if types == {"string"}:
        return text
    stripped = text.strip()
    word = (
        stripped if "string" in types else {"none": "null"}.get(stripped.lower(), stripped.lower())
    )
    try:
        value = _WORDS[word] if word in _WORDS else _literal(stripped)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    if isinstance(value, float) and value.is_integer() and not types & {"number", "string"}:
        value = int(value)
    kind = TYPES[type(value)]
    if "string" in types and (kind not in types or (kind == "string" and types != ANY_TYPE)):
        return text
    return value


def _literal(text: str) -> Any:
    """A value in JSON, or an array or object in Python. Raises what both parsers raise."""
    try:
        return _DECODER.decode(text)
    except ValueError:
        if text[:1] not in tuple("[{(") or len(text) > _MAX_PYTHON:
            raise
    node = _Constants().visit(ast.parse(text, mode="eval"))
    return json.loads(_as_json(ast.literal_eval(node)))


def _is_json(text: str) -> bool:
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _in_python(text: str, use: ToolUse) -> list[tuple[str, str]]:
    """Calls of tools in Python's form, `[f(a=1), g()]`; empty if it is something else."""
    text = text.strip().rstrip(";")
    if len(text) > _MAX_PYTHON or not any(name in text for name in use.names):
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
