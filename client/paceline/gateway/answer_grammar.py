"""Grammars of answers, in Lark's notation: thoughts, then text with calls that fit their tools.

The text between is free, or bound by a JSON schema or a regular expression. A call is bound from
the first token of its form on, so that its arguments always fit the tool's schema. Marks of forms
are the model's own: its tokens, and texts that the prompt has, as where a template explains them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.client import TextCodec
from paceline.sampling.json_schema import (
    WHITESPACE,
    embedded,
    schemas,
    value_at,
    without_annotations,
)
from paceline.service.limits import CONSTRAINT_BYTES

from .channels import CHANNEL_MARKS
from .errors import bad_request
from .requests import ToolUse
from .tool_calls import BLOCKS, CALL_MARKS, FUNCTOOLS, THOUGHT_MARKS, THOUGHTS
from .tool_schemas import ANY_TYPE, closed, types_of

_ARMED = ("<tool_call>", "<function=", "<|tool_call|>", "[TOOL_CALLS]")
"""Marks of calls in JSON or tags. Behind the others is Python, which stays free."""
_GUIDANCE = {"whitespace_pattern": WHITESPACE, "lenient": True}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in ANY_TYPE for name in names)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


_VALID: dict[str, Callable[[Any], bool]] = {
    "type": _are_types,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "required": lambda value: isinstance(value, list),
    "properties": lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
    "items": _is_schema,
    "additionalProperties": _is_schema,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "multipleOf"), _is_number),
    **dict.fromkeys(("minProperties", "maxProperties"), _is_number),
}
"""What values of keywords may be. Careless programs send others."""


class GrammarTooLong(Exception):
    """A grammar is longer than constraints may be."""


def answer_grammar(
    use: ToolUse,
    constraint: dict[str, Any],
    codec: TextCodec,
    eos_token_ids: Sequence[int],
    prompt: str,
    thought: str = "",
    budget: int | None = None,
) -> str:
    """Return the grammar of an answer; empty if it needs none beside its constraint.

    Where tools may be called ("auto"), calls fit their schemas in each form that the model's marks
    tell, and `constraint`, a JSON schema or a regular expression, binds the answer that is no call.
    Otherwise it binds what comes behind the thought. `thought` is the mark that ends the thought in
    which the prompt ends; empty: none. `budget` is the maximum number of tokens of a thought, which
    ends with the model's own mark then. Raises ApiError if its thoughts end with no token, and
    GrammarTooLong: no verifier takes it.
    """
    made = _Grammar(use, codec, eos_token_ids, prompt, thought, budget)
    in_channels = made.ids.keys() >= CHANNEL_MARKS
    calls = use.mode == "auto"
    armed = calls and (in_channels or bool(made.armed))
    bound = bool(constraint) and (calls or bool(thought))
    limited = budget is not None and (in_channels or bool(made.thoughts))
    if not (armed or bound or (limited and not constraint)):
        return ""
    answer = _answer(constraint) if constraint else ""
    start = made.in_channels(answer) if in_channels else made.in_marks(answer)
    grammar = "\n".join([start, *made.rules])
    if len(grammar) > CONSTRAINT_BYTES:
        raise GrammarTooLong
    return grammar


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(
        self,
        use: ToolUse,
        codec: TextCodec,
        eos_token_ids: Sequence[int],
        prompt: str,
        thought: str,
        budget: int | None,
    ) -> None:
        known = {mark: codec.added_id(mark) for mark in CALL_MARKS | CHANNEL_MARKS | THOUGHT_MARKS}
        self.ids = {mark: id for mark, id in known.items() if id is not None}
        self.rules: list[str] = []
        self._use, self._prompt, self._thought = use, prompt, thought
        self._eos = eos_token_ids
        self._budget = budget
        self._room = CONSTRAINT_BYTES
        self._calls = use.mode == "auto"
        self.armed = [mark for mark in _ARMED if self._calls and self._is_stated(mark)]
        self.thoughts = {
            start: end
            for start, end in THOUGHTS.items()
            if (end == thought if thought else self._is_stated(start))
        }

    def in_marks(self, answer: str) -> str:
        """Return the first rule of texts whose thoughts and calls are between marks."""
        before = self._thoughts()
        self._rule("white", r"/\s*/")
        opened = [] if self._thought else [mark for mark in self.thoughts if mark in self.ids]
        if answer and not self._calls:
            return f"start: {before} answer\nanswer: {answer}"
        if answer:
            others = [mark for mark in BLOCKS if mark not in _ARMED and mark not in self.ids]
            begun = [_in_pattern(mark) for mark in others if mark in self._prompt]
            names = "|".join(map(_in_pattern, sorted(self._use.names)))
            begun += [_in_pattern(FUNCTOOLS), rf"\[({names})\(", rf"({names})\n\{{"]
            free = [mark for mark in BLOCKS if mark not in _ARMED and mark in self.ids]
            armed = self.armed or ["<tool_call>"]  # Hermes's, which many models were trained with
            calls = [f"/({'|'.join(begun)})(.|\n)*/ {self._besides()}*", self._objects()]
            calls += [f"{self._token(*free)} {self._besides()}*"] if free else []
            calls.append(f"(({' | '.join(self._block(mark) for mark in armed)}) white)+")
            return f"start: {before} (calls | answer)\ncalls: {' | '.join(calls)}\nanswer: {answer}"
        tokens = [mark for mark in self.armed if mark in self.ids]
        if tokens or not self.armed:
            any_token = self._besides(*tokens)
            first = f"({self._besides(*tokens, *opened)} {any_token}*)?"
            blocks = " | ".join(map(self._block, tokens))
            return f"start: {before} {first}" + f" (({blocks}) {any_token}*)*" * bool(blocks)
        # The text up to a mark is lazy: it ends with the first one. It has no special tokens.
        texts = "|".join(map(_in_pattern, self.armed))
        bodies = " | ".join(map(self._body, self.armed))
        self.rules += [rf"upto[lazy]: /(.|\n)*({texts})/", r"rest: /(.|\n)*/"]
        return f"start: {before} (upto ({bodies}))* rest"

    def in_channels(self, answer: str) -> str:
        """Return the first rule of texts in channels (the harmony format)."""
        ends = ("<|end|>", "<|return|>", "<|call|>")
        channel, message = self._token("<|channel|>"), self._token("<|message|>")
        form = f"(/ ?/ {self._token('<|constrain|>')} /\\w+/)?"
        body = self._besides("<|start|>", "<|channel|>", "<|message|>", *ends)
        begin = f'{self._token("<|start|>")} "assistant"'
        end = self._token("<|end|>")
        thought = f'{channel} "analysis" {message} {self._limited(body)} {end} {begin}'
        thoughts = f"({thought}){'*' if self._budget is None else '?'}"
        last = f"{channel} /final|commentary/ {form} {message} {body}* {self._token(*ends)}?"
        if answer:
            self.rules.append(f"answer: {answer}")
            last = f'({channel} "final" {form} {message})? answer'
        kinds = [last]
        if self._calls:
            calls = []
            for index, name in enumerate(sorted(self._use.names)):
                to = rf"to=functions\.{_in_pattern(name)}"
                rest = f"{form} {message} {self._arguments(index, name)} {self._token('<|call|>')}?"
                calls.append(f"{channel} /(analysis|commentary) {to}( \\w*)?/ {rest}")
                calls.append(f"/ ?{to}/ {channel} /(analysis|commentary)( \\w*)?/ {rest}")
            self.rules.append(f"call: {' | '.join(calls)}")
            kinds.append(f"call ({begin} call)*")
        said = f'({channel} "commentary" {form} {message} {body}* {end} {begin})*'
        first = "" if self._prompt.rstrip().endswith("assistant") else f"({body}+ {end}? {begin}?)?"
        return f"start: {first} {thoughts} {said * (not answer)} ({' | '.join(kinds)})"

    def _is_stated(self, mark: str) -> bool:
        return mark in self._prompt or any(mark.startswith(start) for start in self.ids)

    def _token(self, *marks: str) -> str:
        """Return one of these tokens."""
        return f"<[{','.join(str(self.ids[mark]) for mark in marks)}]>"

    def _besides(self, *marks: str) -> str:
        """Return any token but these, where they are tokens, and those that end the text."""
        left_out = [self.ids[mark] for mark in marks if mark in self.ids]
        return f"<[^{','.join(map(str, [*left_out, *self._eos]))}]>"

    def _mark(self, mark: str) -> str:
        """Return a mark: its token, and the text behind that, or all as text."""
        token = max((start for start in self.ids if mark.startswith(start)), key=len, default="")
        parts = [self._token(token)] if token else []
        parts += [json.dumps(mark.removeprefix(token))] if mark != token else []
        return " ".join(parts)

    def _thoughts(self) -> str:
        """Return a reference to the thoughts before an answer; empty if there can be none."""
        forms = []
        for start, end in self.thoughts.items():
            rest = f"{self._limited(self._besides(end))} {self._mark(end)}"
            if end not in self.ids:
                if self._budget is not None:
                    raise bad_request(
                        f"the model has no token {end}: a budget needs one that ends thoughts",
                        "thinking_token_budget",
                    )
                rest = f"rest{len(self.rules)}"
                self.rules.append(f"{rest}[suffix={json.dumps(end)}]: /(.|\\n)*/")
            forms.append(rest if self._thought else f"{self._mark(start)} {rest}")
        if not forms:
            return ""
        self.rules.append(rf"thought: ({' | '.join(forms)}) /\s*/")
        return "thought" if self._thought else "thought*" if self._budget is None else "thought?"

    def _limited(self, token: str) -> str:
        """Return as many tokens as a thought may have."""
        if self._budget == 0:
            return ""
        return f"{token}*" if self._budget is None else f"{token}{{0,{self._budget}}}"

    def _block(self, mark: str) -> str:
        return f"{self._mark(mark)} {self._body(mark)}"

    def _body(self, mark: str) -> str:
        """Return what follows a mark of calls, with its end mark, which some models leave out."""
        if mark == "<function=":  # models that leave out the tag before it write the one behind
            return f"{self._functions('')} (white {self._mark(BLOCKS['<tool_call>'])})?"
        forms = [self._objects()]
        if self._is_stated("<function="):
            function = self._functions("<function=")
            forms.append(f"{function} (white {function})*")
        if mark == "[TOOL_CALLS]":
            forms.append(self._named())
        end = f"white {self._mark(BLOCKS[mark])}" if BLOCKS[mark] else ""
        body = f"({' | '.join(forms)})" + f" ({end})?" * bool(end)
        pairs = f" | {self._pairs()} {end}" if self._is_stated("<arg_key>") else ""
        return f"white ({body}{pairs})"

    def _rule(self, name: str, body: str) -> str:
        """Return the name of a rule, which is added once. Raises GrammarTooLong if there is no
        room, as for a grammar that would copy a long schema for each of its properties."""
        rule = f"{name}: {body}"
        if rule not in self.rules:
            self._room -= len(rule)
            if self._room < 0:
                raise GrammarTooLong
            self.rules.append(rule)
        return name

    def _arguments(self, index: int, name: str) -> str:
        """Return JSON that fits the schema of a tool."""
        return self._rule(f"arguments{index}", f"%json {json.dumps(self._schema(name))}")

    def _schema(self, name: str) -> dict[str, Any]:
        parameters = next(
            tool.function.parameters for tool in self._use.tools if tool.function.name == name
        )
        return _guided(closed(parameters))

    def _objects(self) -> str:
        """Return objects with a name and arguments, one or several, in an array or not."""
        calls: list[dict[str, Any]] = []
        parts: dict[str, Any] = {}
        for index, name in enumerate(sorted(self._use.names)):
            schema, place = self._schema(name), f"arguments{index}"
            parts[place] = embedded(schema, f"#/$defs/{place}")
            for given in (["arguments"], ["parameters"], [])[: 2 if schema.get("required") else 3]:
                named: dict[str, Any] = {"type": {"const": "function"}, "name": {"const": name}}
                named |= {key: {"$ref": f"#/$defs/{place}"} for key in given}
                calls.append(
                    {
                        "type": "object",
                        "properties": {**named, "id": {"type": "string"}},
                        "required": ["name", *given],
                        "additionalProperties": False,
                    }
                )
        array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        schema = {"anyOf": [*calls, array], "$defs": parts, "x-guidance": _GUIDANCE}
        call = self._rule("call", f"%json {json.dumps(schema)}")
        return self._rule("objects", rf"{call} (/[\s,;]+/ {call})*")

    def _named(self) -> str:
        """Return a name and JSON."""
        ids, arguments = self._mark("[CALL_ID]"), self._mark("[ARGS]")
        calls = [
            rf"/{_in_pattern(name)}/ ({ids} /\w+/)? {arguments}? {self._arguments(index, name)}"
            for index, name in enumerate(sorted(self._use.names))
        ]
        return self._rule("named", " | ".join(calls))

    def _functions(self, begin: str) -> str:
        """Return arguments in tags, or JSON, behind the name of a function."""
        calls = []
        for index, name in enumerate(sorted(self._use.names)):
            end = self._mark("</function>")
            tags = self._tags(name, '"<parameter={}>"', "</parameter>")
            body = f"(white {self._arguments(index, name)} white {end} | {tags} {end})"
            calls.append(f"{json.dumps(f'{begin}{name}>', ensure_ascii=False)} {body}")
        return self._rule(f"functions{len(begin)}", " | ".join(calls))

    def _pairs(self) -> str:
        """Return a name, and tags for keys and values."""
        marks = map(self._mark, ("<arg_key>", "</arg_key>", "<arg_value>"))
        begin, end, value = marks
        calls = [
            f"{json.dumps(name, ensure_ascii=False)} "
            + self._tags(name, f'{begin} "{{}}" {end} white {value}', "</arg_value>")
            for name in sorted(self._use.names)
        ]
        return self._rule("pairs", " | ".join(calls))

    def _tags(self, name: str, begin: str, end: str) -> str:
        """Return the arguments of a tool, each behind `begin` with its name and before `end`."""
        schema = self._schema(name)
        named, required = schema.get("properties"), schema.get("required")
        required = required if isinstance(required, list) else []
        parts = ["white"]
        for key in named if isinstance(named, dict) else ():
            if types_of(schema, key).isdisjoint({"string"}):
                part: dict[str, Any] = {"$ref": f"#/$defs/all/properties/{key}"}
                part |= {"$defs": {"all": embedded(schema, "#/$defs/all")}, "x-guidance": _GUIDANCE}
                rule = self._rule(f"value{len(self.rules)}", f"%json {json.dumps(part)}")
                value = f"white {rule} white {self._mark(end)}"
            elif end in self.ids:
                value = f"{self._besides(end)}* {self._mark(end)}"
            else:
                value = self._rule("text[lazy]", rf"/(.|\n)*{_in_pattern(end)}/").partition("[")[0]
            tag = f"{begin.format(json.dumps(key, ensure_ascii=False)[1:-1])} {value} white"
            parts.append(tag if key in required else f"({tag})?")
        return " ".join(parts)


def _guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema as the grammar library reads it: without what it cannot read. What it does
    not support, or what is malformed, is not enforced: a call with such a schema is a call too."""
    copied: dict[str, Any] = json.loads(without_annotations(json.dumps(schema)))
    for part in list(schemas(copied)):
        pattern, reference = part.get("pattern"), part.get("$ref")
        names = part.get("patternProperties")
        if isinstance(names, dict) and not all(map(_is_plain, names)):
            for keyword in ("patternProperties", "additionalProperties"):
                part.pop(keyword, None)
        if isinstance(pattern, str) and not _is_plain(pattern):
            del part["pattern"]
        if "$ref" in part and not _leads(copied, reference):
            del part["$ref"]
        for keyword in [name for name, valid in _VALID.items() if name in part]:
            if not _VALID[keyword](part[keyword]):
                del part[keyword]
    return {**copied, "x-guidance": _GUIDANCE}


def _leads(root: dict[str, Any], reference: object) -> bool:
    """Return whether a reference is one to a schema within the root."""
    local = isinstance(reference, str) and reference.startswith("#")
    return local and _is_schema(value_at(root, str(reference)[1:]))


def _is_plain(pattern: str) -> bool:
    """Return whether a pattern has none of the forms that grammars lack."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return not re.search(r"\(\?[^:]|\\[1-9bBAZ]", pattern)


def _answer(constraint: dict[str, Any]) -> str:
    """Return a JSON schema or a regular expression in Lark's notation."""
    if pattern := constraint.get("regex"):
        escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
        return f"/{escaped}/".replace("\n", r"\n")
    source = constraint["json_schema"]
    text = without_annotations(source if isinstance(source, str) else json.dumps(source))
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise bad_request("the JSON schema is no JSON", "response_format") from None
    if isinstance(schema, dict):
        schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return f"%json {json.dumps(schema)}"


def _in_pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
