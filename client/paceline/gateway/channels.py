"""Channels of gpt-oss (the harmony format): thoughts, calls and the answer of one text.

A message is a header and a body between marks, which are special tokens:
`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`. A call has a recipient in its header,
`to=functions.NAME`. The prompt has the first `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from paceline.client import TextCodec

from .requests import ToolUse
from .tool_calls import CALL_MARKS, CallParser, Part, Reasoning, undecided

_HEADERS = ("<|start|>", "<|channel|>")
_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CONSTRAIN = "<|constrain|>"
CHANNEL_MARKS = frozenset({*_HEADERS, _BODY, *_ENDS, _CONSTRAIN})
"""Special tokens that the text must have for its channels to be read."""

_LIMITS = (*_HEADERS, *_ENDS)
_LIMIT = re.compile("|".join(map(re.escape, _LIMITS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")


AnswerParser: TypeAlias = "ChannelParser | CallParser"
"""Separates the parts of an answer."""


def marks_of(codec: TextCodec | None, use: ToolUse) -> frozenset[str]:
    """The special tokens that the texts of a model must have, so that their parts can be read."""
    if codec is None:
        return frozenset()
    wanted = CHANNEL_MARKS | CALL_MARKS if use.mode == "auto" else CHANNEL_MARKS
    found = frozenset(map(codec.token_text, codec.special_ids(wanted)))
    return found if found >= {*_HEADERS, _BODY} else found - CHANNEL_MARKS


def parser_of(use: ToolUse, marks: frozenset[str]) -> AnswerParser:
    """A parser of one text."""
    return ChannelParser(use, marks) if _BODY in marks else CallParser(use, marks)


class ChannelParser:
    """Separates thoughts and calls from the answer, while the text streams.

    Text outside messages, such as one that a grammar enforces or a continued answer, is the answer.
    """

    def __init__(self, use: ToolUse, special: frozenset[str] = frozenset()) -> None:
        self._use = use
        self._answer = CallParser(use, special)
        self._left = ""
        self._header: str | None = None  # of the message that is read; None: the body of one
        self._channel = "final"
        self._recipient = ""

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._answer.calls

    def push(self, text: str) -> list[Part]:
        """The parts that became final with more text, in order."""
        self._left += text
        return list(self._read())

    def flush(self) -> list[Part]:
        """The rest, when no text follows."""
        parts = list(self._read())
        if self._header is None:
            parts += self._body(self._left, complete=True)
        self._left = ""
        return parts + self._answer.flush()

    def _read(self) -> Iterator[Part]:
        while True:
            if self._header is not None:
                header, mark, rest = self._left.partition(_BODY)
                if not mark:
                    return
                self._begin(self._header + header)
                self._left = rest
                continue
            limit = _LIMIT.search(self._left)
            if limit is None:
                kept = 0 if self._recipient else undecided(self._left, _LIMITS)
                if not self._recipient:
                    body = self._left[: len(self._left) - kept]
                    self._left = self._left[len(body) :]
                    yield from self._body(body, complete=False)
                return
            yield from self._body(self._left[: limit.start()], complete=True)
            self._left = self._left[limit.end() :]
            self._channel, self._recipient = "", ""  # between messages
            if limit[0] in _HEADERS:
                self._header = limit[0]

    def _begin(self, header: str) -> None:
        """Begins a message with this header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else ""
        self._header = None

    def _body(self, text: str, *, complete: bool) -> Iterator[Part]:
        if not text or not self._channel:
            return
        name = self._recipient.removeprefix("functions.")
        if complete and name != self._recipient and self._use.mode != "none":
            if self.calls == 0 or self._use.parallel:
                yield self._answer.made(name, text.strip())
        elif self._channel == "analysis" or self._recipient:
            yield Reasoning(text)
        else:
            yield from self._answer.push(text)
