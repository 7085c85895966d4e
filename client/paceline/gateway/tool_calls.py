"""Calls of functions in the text of a model.

Read are Hermes's form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, SmolLM),
and JSON from the start of the text on: objects with `name` and `arguments` or `parameters`
(Llama 3), or an array of them (Mistral).
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .requests import ToolUse

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# What stands before, between and after the objects of calls.
_SEPARATORS = " \n\r\t,;[]"
# The keys that an object of a call may begin with.
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
# White space before a tag, and the beginning of a tag, at the end of a text.
_HELD = re.compile(
    r"\s*(?:" + "|".join(re.escape(_OPEN[:end]) for end in range(len(_OPEN) - 1, 0, -1)) + r")?\Z"
)
_DECODER = json.JSONDecoder()
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """JSON as text."""
    id: str = field(default_factory=lambda: "".join(secrets.choice(_LETTERS) for _ in range(9)))
    """9 letters and digits: templates of Mistral's models take no other."""


class CallParser:
    """Separates calls from the other text, while it streams.

    A call is reported when it is complete. Text that turns out to be no call is passed on.
    """

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._left = ""
        # "all": no calls are looked for; "named": the text is arguments; "start": before the first
        # character; "text"; "tag" and "json": among calls.
        self._state = {"none": "all", "named": "named"}.get(use.mode, "start")
        self.calls = 0
        """Number of calls so far."""

    def push(self, text: str) -> list[str | Call]:
        """The parts that became final with more text, in order."""
        if self._state == "all":
            return [text] if text else []
        self._left += text
        return list(self._read())

    def flush(self) -> list[str | Call]:
        """The rest, when no text follows."""
        if self._state == "named":
            return [self._made(self._use.name, self._left)]
        parts = list(self._read())
        rest = self._left
        if self._state == "tag":
            parts += self._objects()
            rest = _OPEN + self._left if self._left.strip(_SEPARATORS) else ""
        if rest.strip(_SEPARATORS) or (rest and not self.calls):
            parts.append(rest)
        self._left = ""
        return parts

    def _read(self) -> Iterator[str | Call]:
        if self._state == "named":
            return
        if self._state == "start":
            stripped = self._left.lstrip()
            if not stripped:
                return
            self._state = "json" if stripped[0] in "[{" else "text"
        if self._state == "json":
            yield from self._objects()
            if self.calls or self._may_be_call():
                return
            self._state = "text"  # JSON that is no call
        yield from self._text()

    def _text(self) -> Iterator[str | Call]:
        while True:
            if self._state == "text":
                before, tag, after = self._left.partition(_OPEN)
                if not tag:
                    held = _HELD.search(before)
                    end = held.start() if held else len(before)
                    self._left = before[end:]
                    if end:
                        yield before[:end]
                    return
                if before.strip():
                    yield before.rstrip()
                self._state, self._left = "tag", after
            inside, tag, after = self._left.partition(_CLOSE)
            if not tag:
                return
            self._left = inside
            yield from self._objects()
            if self._left.strip(_SEPARATORS):
                yield f"{_OPEN}{self._left}{_CLOSE}"
            self._state, self._left = "text", after

    def _objects(self) -> Iterator[Call]:
        """Takes complete objects of calls off the front."""
        while True:
            rest = self._left.lstrip(_SEPARATORS)
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return
            call = self._call(value)
            if call is None:
                return
            self._left = rest[end:]
            if self.calls == 0 or self._use.parallel:
                yield self._made(*call)

    def _call(self, value: Any) -> tuple[str, str] | None:
        """Name and arguments of an object; None if it is no call."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        if self._state == "json" and value["name"] not in self._use.names:
            return None  # without a tag, an object with a name may be an answer
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return value["name"], arguments

    def _made(self, name: str, arguments: str) -> Call:
        self.calls += 1
        return Call(name, arguments)

    def _may_be_call(self) -> bool:
        """Whether text that begins like JSON may still become a call."""
        rest = self._left.lstrip(_SEPARATORS)
        try:
            _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            key = _FIRST_KEY.match(rest)
            return not rest or (rest[0] == "{" and (key is None or key[1] in _KEYS))
        return False
