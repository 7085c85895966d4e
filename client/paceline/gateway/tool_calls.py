"""Calls of functions in the text of a model.

Between marks, which are special tokens of some models and text of others: JSON (Hermes, Qwen,
SmolLM, Granite, Phi-4-mini), a name and JSON (Mistral), tags for each argument (Qwen3-Coder,
GLM-4.5) or a call in Python's form (Olmo 3). From the start of the text on also without marks: JSON
(Llama 3, Mistral, Qwen2.5-Coder), Python's form (Llama 3.2), or a tool's name with JSON on the next
line (GLM-4). The marks tell the form, so that no model needs an option.

JSON without marks is calls if the whole answer is objects, in fences or not, of tools on offer with
arguments of their schemas, since it may be what somebody asked for.

Thoughts are apart from the text, and have no calls. A call is complete with its end mark, or with
the last bracket of its JSON or Python; what is cut off before is text.
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

from paceline.client import undecided

from .requests import ToolUse
from .tool_schemas import ANY_TYPE, TYPES, fits, types_of

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

THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought": "<channel|>",
}
"""What thoughts begin with, and the mark that ends them."""
THOUGHT_MARKS = frozenset({*THOUGHTS, *THOUGHTS.values(), "<|channel>"})
"""Special tokens that the text must have for its thoughts to be told from the rest."""

_OPENING = (*BLOCKS, _STRAY, *THOUGHTS)
_MARK = re.compile("|".join(map(re.escape, _OPENING)))
_THOUGHT = re.compile("|".join(map(re.escape, THOUGHTS)))
FUNCTOOLS = "functools["  # the form of Phi-4-mini, at the start of a text
_SEPARATORS = " \n\r\t,;[]"  # what stands before, between and after the objects of calls
# The same of calls without a mark.
_FENCE = "```"
_BETWEEN = re.compile(rf"(?:[\s,;\[\]]+|{_FENCE}\w*|{_STRAY})*")
# The keys that an object of a call without a mark may have.
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "function", "id")
_ENTRY = re.compile(r'\s*\}?\s*[{,]\s*"(\w*)"\s*:\s*')
_ENTRY_BEGUN = re.compile(r'\s*\}?\s*(?:[{,]\s*(?:"(\w*)(?:"\s*)?)?)?')
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


# Texts may have line breaks, as models write them. Numbers must be JSON's.
DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=_number)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON as text
    id: str = field(default_factory=lambda: "".join(secrets.choice(_LETTERS) for _ in range(9)))
    """9 letters and digits: templates of Mistral's models take no other."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments, which are an object for every client."""
        try:
            value = DECODER.decode(self.arguments)
        except (ValueError, RecursionError):
            value = self.arguments
        return value if isinstance(value, dict) else {"input": value}

    @property
    def input(self) -> str:
        """The text that a custom tool is called with."""
        text = self.values.get("input")
        return text if isinstance(text, str) else self.arguments


@dataclass(frozen=True)
class Reasoning:
    text: str


Part = str | Call | Reasoning  # a part of an answer


def end_of_open_thought(prompt: str, continued: str = "") -> str:
    """Return the mark that ends the thought in which a prompt ends; empty: in none. `continued` is
    the text of its last message if the answer goes on with that."""
    for opening, end in THOUGHTS.items():
        if prompt.rstrip().endswith(opening) or continued.rfind(opening) > continued.rfind(end):
            return end
    return ""


class CallParser:
    """Separates thoughts and calls from the other text, while it streams.

    A thought begins with the text, or behind another thought. Its marks elsewhere are quoted, and
    what is a call between them is quoted too.

    A call is reported when it is complete. Text that turns out to be no call is passed on, without
    the marks that are special tokens (`special`). `thought` is the mark that ends the thought in
    which the text begins; empty: it begins in none.
    """

    def __init__(
        self, use: ToolUse, special: frozenset[str] = frozenset(), thought: str = ""
    ) -> None:
        self._use = use
        self._special = special
        self._left = ""
        self._mark = ""
        self._space = ""  # before the mark
        self._within = 0  # the last place of the open block that is within a text of its call
        # "thought"; "start": before the first character of the answer; "text"; "named": the text is
        # arguments; "block" and "json": among calls.
        self._state = "thought" if thought else "start"
        self._thought_end = thought  # the mark that ends the open thought
        self._begun = False  # whether the open thought has a text
        self._quoted_end = ""  # the mark that ends what is quoted as a thought
        self._calling = use.mode in ("auto", "required")  # whether calls are looked for
        self._marks = _OPENING if self._calling else tuple(special)
        self._length = 0  # of the text so far
        self.thoughts: list[int] = [0] * bool(thought)
        """Places in the text where thoughts begin and end, in turn."""
        self.calls = 0  # number of calls so far

    def push(self, text: str) -> list[Part]:
        """Return the parts that became final with more text, in order."""
        self._left += text
        self._length += len(text)
        return [part for part in self._read() if part]

    def flush(self) -> list[Part]:
        parts = [part for part in self._read(final=True) if part]
        if self._state == "named" and _is_json(self._left):
            return [*parts, self.made(self._use.name, self._left)]
        rest, self._left = self._left * (self._state != "thought"), ""
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

    def _read(self, *, final: bool = False) -> Iterator[Part]:
        while self._state != "named":
            if self._state == "thought":
                yield from self._think(final)
                if self._state == "thought":
                    return
            elif self._state == "start":
                if not self._started():
                    return
            elif self._state == "json":
                calls, rest = _objects_in(self._left, self._use)
                if self._use.mode == "required":  # calls are all that may come
                    yield from self._reported(calls)
                    calls, self._left = [], rest
                if not final and self._may_be_calls(rest):
                    return
                if not final or not _FENCE.startswith(rest):
                    calls = _in_python(self._left, self._use) if final else []
                yield from self._reported(calls)
                self._state, self._left = "text", self._left * (not calls)
            elif self._state == "block":
                if (split := self._split(final)) is None:
                    return
                inside, end_mark, self._left, ended = split
                self._state, self._within = "text", 0
                yield from self._block(inside, end_mark, ended)
            elif self._quoted_end and (self._quoted_end in self._left or not final):
                yield from self._quoted()
                if self._quoted_end:
                    return
            elif self._calling and (match := _MARK.search(self._left)):
                yield from self._open(match)
            else:
                kept = 0 if final else undecided(self._left, self._marks)
                text = self._left[: len(self._left) - kept]
                text = text.rstrip() if self._calling else text
                self._left = self._left[len(text) :]
                yield self._plain(text)
                return

    def _quoted(self) -> Iterator[Part]:
        """Pass on what is quoted as a thought. A call in it waits for its end."""
        text, mark, rest = self._left.partition(self._quoted_end)
        if mark:
            self._quoted_end = ""
        else:
            call, marks = _MARK.search(text), (self._quoted_end, *_OPENING)
            end = call.start() if call else len(text) - undecided(text, marks)
            text = text[:end].rstrip()
            rest = self._left[len(text) :]
        self._left = rest
        yield self._plain(text + mark)

    def _think(self, final: bool) -> Iterator[Part]:
        """Pass on a thought, without white space around it."""
        text, mark, rest = self._left.partition(self._thought_end)
        kept = 0 if mark or final else undecided(text, (self._thought_end,))
        thought = text[: len(text) - kept].rstrip()
        self._left = rest if mark else text[len(thought) :]
        if thought:
            yield Reasoning(thought if self._begun else thought.lstrip())
        self._begun = self._begun or bool(thought)
        if mark:
            self.thoughts.append(self._length - len(self._left))
            self._state, self._begun = "start", False

    def _started(self) -> bool:
        """Find the form at the start of a text; False if more of it is needed."""
        stripped = self._left.lstrip()
        if self.thoughts:  # white space behind a thought belongs to it
            self._left = stripped
        if thought := _THOUGHT.match(stripped):
            self.thoughts.append(self._length - len(stripped))
            self._state, self._thought_end = "thought", THOUGHTS[thought[0]]
            self._left = stripped[thought.end() :]
            return True
        names = [f"{name}\n{{" for name in self._use.names] if self._calling else []
        starts = (*THOUGHTS, FUNCTOOLS, _FENCE, *names) if self._calling else THOUGHTS
        if any(len(stripped) < len(start) and start.startswith(stripped) for start in starts):
            return False
        if self._use.mode == "named":
            self._state = "named"
            return True
        in_json = self._calling and stripped.startswith(("[", "{", _FENCE))
        self._state = "json" if in_json else "text"
        if stripped.startswith(tuple(names)):
            self._state, self._space = "block", self._left[: -len(stripped)]
            self._left = stripped
        elif self._calling and stripped.startswith(FUNCTOOLS):
            self._state, self._mark, self._left = "block", "functools", stripped[9:]
        return True

    def _open(self, match: re.Match[str]) -> Iterator[Part]:
        """Go on behind a mark in a text; what is before it is final."""
        before, mark = self._left[: match.start()], match[0]
        self._left = self._left[match.end() :]
        if mark in THOUGHTS:
            self._quoted_end = THOUGHTS[mark]
        if mark in THOUGHTS or (mark == _STRAY and not self.calls):
            yield self._plain(before + mark)
            return
        text = before.rstrip()
        yield text
        self._space = before[len(text) :]
        if mark in BLOCKS:
            self._state, self._mark = "block", mark

    def _plain(self, text: str) -> str:
        """Return a text without its marks that are special tokens."""
        for mark in self._special:
            text = text.replace(mark, "")
        return text

    def _split(self, final: bool) -> tuple[str, str, str, bool] | None:
        """Return the open block, the mark that ends it, the text behind it, and whether it has an
        end; None if that may still come."""
        end = BLOCKS.get(self._mark, "")
        marks = re.compile(re.escape(end)) if end else _MARK
        ended = True
        for match in marks.finditer(self._left, self._within):
            if not self._is_within(match.start()):
                break
            self._within = match.start()
        else:
            if not final:
                return None
            ended = False
            first = marks.search(self._left) if self._within else None
            calls, rest = _calls_in(self._block_text(self._left), self._use, ended)
            if first is None or (calls and not rest.strip(_SEPARATORS)):
                return self._left, "", "", ended
            match = first  # it ends a damaged call
        behind = match.end() if end else match.start()
        return self._left[: match.start()], end, self._left[behind:], ended

    def _block_text(self, inside: str) -> str:
        return self._mark + inside if self._mark == "<function=" else inside

    def _is_within(self, at: int) -> bool:
        """Return whether a mark at a place of the open block is within a text of its call. Such
        marks end nothing."""
        before = self._left[:at]
        call = self._block_text(before).lstrip(_SEPARATORS)
        if _JSON_CALL.match(call) or _NAME_AND_JSON.match(call):
            within = self._within > 0
            for quote in _QUOTE.finditer(before, self._within):
                within ^= quote[0] == '"'
            return within
        if call.startswith("<function="):
            body = call.rstrip().removesuffix("</function>").rstrip()
            return "<parameter=" in body and not body.endswith("</parameter>")
        return "<arg_key>" in before and not before.rstrip().endswith("</arg_value>")

    def _block(self, inside: str, end: str, ended: bool) -> Iterator[Part]:
        """Yield the calls of a block, or its text if it has none."""
        whole = self._mark + inside + end
        in_tags = self._mark == "<function="
        calls, rest = _calls_in(whole if in_tags else inside, self._use, ended)
        yield from self._reported(calls)
        if rest.strip(_SEPARATORS + "}" * bool(calls)) or not self.calls:
            text = whole if not calls else rest if in_tags else self._mark + rest
            yield self._plain(self._space + text)

    def _reported(self, calls: list[tuple[str, str]]) -> Iterator[Part]:
        for name, arguments in calls:
            if self.calls == 0 or self._use.parallel:
                yield self.made(name, arguments)

    def _may_be_calls(self, rest: str) -> bool:
        """Return whether what follows the calls that a text begins with may still become some."""
        if _FENCE.startswith(rest) or _STRAY.startswith(rest):
            return True
        for called in (f"{name}(" for name in self._use.names):
            if called.startswith(rest) or rest.startswith(called):
                return self._left.lstrip().startswith("[")
        return not _is_json(rest, front=True) and _begins_call(rest, self._use.names)


def _begins_call(text: str, names: frozenset[str]) -> bool:
    """Return whether an object whose end is missing may become a call of one of these tools."""
    at = 0
    if not text.startswith("{"):
        return False
    while entry := _ENTRY.match(text, at):
        key, at = entry[1], entry.end()
        if key not in _KEYS:
            return False
        if key == "function":
            continue  # its object has the same keys
        try:
            value, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            begun = text[at:]
            if key == "name":
                return any(f'"{name}"'.startswith(begun) for name in names)
            return begun[:1] in (("", "{", '"', "n") if key in _ARGUMENTS else ("", '"'))
        if (key == "name" and value not in names) or (
            key in _ARGUMENTS and not isinstance(value, dict | str | type(None))
        ):
            return False
    last = _ENTRY_BEGUN.fullmatch(text, at)
    return last is not None and any(key.startswith(last[1] or "") for key in _KEYS)


def _calls_in(text: str, use: ToolUse, ended: bool) -> tuple[list[tuple[str, str]], str]:
    """Return names and arguments of the calls in a block, and the text that is none. Without an end
    of the block (`ended`), only calls with an end of their own count."""
    if text.strip() in use.names:
        return ([(text.strip(), "{}")], "") if ended else ([], text)
    fenced = _FENCED.fullmatch(text)
    text = fenced[1] if fenced else text
    calls, rest = _objects_in(text)
    if calls or not rest.strip(_SEPARATORS):
        return calls, rest
    if "<function=" in text:
        return _functions_in(text, use, ended)
    if "<arg_key>" in text:
        return _pairs_in(text, use) if ended else ([], text)
    calls = _named_objects_in(text) or _in_python(text, use)
    return calls, "" if calls else text


def _objects_in(text: str, use: ToolUse | None = None) -> tuple[list[tuple[str, str]], str]:
    """Return calls that are JSON at the front of a text, and the rest. Without a mark, an object
    may be an answer: with `use`, calls are of its tools, with arguments that they take."""
    calls: list[tuple[str, str]] = []
    while True:
        between = _BETWEEN.match(text) if use else None
        rest = text[between.end() :] if between else text.lstrip(_SEPARATORS)
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return calls, rest
        call = _as_call(value)
        if call is None or (use is not None and not _is_taken(value, call, use)):
            return calls, rest
        calls.append(call)
        text = rest[end:]


def _is_taken(value: dict[str, Any], call: tuple[str, str], use: ToolUse) -> bool:
    """Return whether an object is a call of a tool, with arguments of its schema alone."""
    schemas = [tool.function.parameters for tool in use.tools if tool.function.name == call[0]]
    try:
        arguments = DECODER.decode(call[1])
    except (ValueError, RecursionError):
        return False
    known = value.keys() <= {*_KEYS} and isinstance(arguments, dict)
    return known and any(fits(arguments, schema) for schema in schemas)


def _as_call(value: Any) -> tuple[str, str] | None:
    """Return the name and arguments of an object; None if it is no call."""
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
    """Return calls that are a name and JSON; empty if something else is there."""
    calls = []
    rest = text.strip(_SEPARATORS)
    while rest:
        match = _NAME_AND_JSON.match(rest)
        if match is None:
            return []
        try:
            value, end = DECODER.raw_decode(rest, match.end())
        except (ValueError, RecursionError):
            return []
        calls.append((match["name"], _as_json(value)))
        rest = rest[end:].strip(_SEPARATORS)
    return calls


def _functions_in(text: str, use: ToolUse, ended: bool) -> tuple[list[tuple[str, str]], str]:
    """Return calls with arguments in tags, or JSON, and the text from the first damaged one on."""
    calls: list[tuple[str, str]] = []
    rest = text
    while function := _FUNCTION.search(rest):
        name, pairs, at = function[1].strip(), dict[str, str](), function.end()
        while parameter := _PARAMETER.match(rest, at):
            # A value is on lines of its own.
            pairs[parameter[1].strip()] = parameter[2].removeprefix("\n").removesuffix("\n")
            at = parameter.end()
        arguments = _typed(name, pairs, use)
        if not pairs and rest.startswith("{", at):
            try:
                value, at = DECODER.raw_decode(rest, at)
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
    """Return the call of a name with pairs of keys and values, and the text if it is damaged."""
    name, pairs, at = text.partition("<arg_key>")[0], dict[str, str](), text.index("<arg_key>")
    while pair := _PAIR.match(text, at):
        pairs[pair[1].strip()], at = pair[2], pair.end()
    if text[at:].strip():
        return [], text
    return [(name.strip(), _typed(name.strip(), pairs, use))], ""


def _typed(name: str, pairs: Mapping[str, str], use: ToolUse) -> str:
    """Return arguments as JSON, each with a type that the function's schema allows."""
    schemas = [tool.function.parameters for tool in use.tools if tool.function.name == name]
    schema = schemas[0] if schemas else {}
    return _as_json({key: _value(text, types_of(schema, key)) for key, text in pairs.items()})


def _value(text: str, types: frozenset[str]) -> Any:
    """Return the value that a text in tags stands for, where these types are allowed.

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
    """Return a value in JSON, or an array or object in Python. Raises what both parsers raise."""
    try:
        return DECODER.decode(text)
    except ValueError:
        if text[:1] not in tuple("[{(") or len(text) > _MAX_PYTHON:
            raise
    node = _Constants().visit(ast.parse(text, mode="eval"))
    return json.loads(_as_json(ast.literal_eval(node)))


def _is_json(text: str, *, front: bool = False) -> bool:
    """Return whether a text is JSON, or begins with it (`front`)."""
    try:
        (DECODER.raw_decode if front else DECODER.decode)(text)
    except (ValueError, RecursionError):
        return False
    return True


def _in_python(text: str, use: ToolUse) -> list[tuple[str, str]]:
    """Return calls of tools in Python's form, `[f(a=1), g()]`; empty if there is something else."""
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
