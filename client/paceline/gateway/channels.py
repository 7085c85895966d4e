"""Channels of gpt-oss (the harmony format): thoughts, calls and the answer of one text.

A message is a header and a body between marks, which are special tokens:
`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`. A call has a recipient in its header,
`to=functions.NAME`. The prompt has the first `<|start|>assistant`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from paceline.client import Chunk, TextCodec, undecided

from .requests import ToolUse
from .tool_calls import CALL_MARKS, THOUGHT_MARKS, CallParser, Part, Reasoning

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


def marks_of(codec: TextCodec | None, use: ToolUse) -> frozenset[str]:
    """Return the special tokens that texts of a model must have for their parts to be read."""
    if codec is None:
        return frozenset()
    wanted = CHANNEL_MARKS | THOUGHT_MARKS | (CALL_MARKS if use.mode == "auto" else frozenset())
    marks = frozenset(map(codec.token_text, codec.special_ids(wanted)))
    return marks if marks >= {*_HEADERS, _BODY} else marks - CHANNEL_MARKS


def parser_of(use: ToolUse, marks: frozenset[str], thought: str = "") -> AnswerParser:
    """Return a parser of one text. `thought` is the mark that ends the thought in which the text
    begins; empty if it begins in none."""
    return ChannelParser(use, marks) if _BODY in marks else CallParser(use, marks, thought)


class Answer:
    """The parts of one answer, read from its chunks while it streams."""

    def __init__(self, use: ToolUse, marks: frozenset[str], thought: str = "") -> None:
        self._parser = parser_of(use, marks, thought)
        self._pieces: list[int] = []  # length of the text of each token

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._parser.calls

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens whose text begins in a thought, with its marks."""
        places = self._parser.thoughts
        begins = accumulate(self._pieces[:-1], initial=0) if places and self._pieces else ()
        return sum(bisect_right(places, at) % 2 for at in begins)

    def push(self, chunks: Sequence[Chunk]) -> list[Part]:
        """Return the parts that became final with more chunks, in order."""
        self._pieces += [len(piece) for chunk in chunks for piece in chunk.pieces]
        return self._parser.push("".join(chunk.text for chunk in chunks))

    def flush(self) -> list[Part]:
        return self._parser.flush()


class ChannelParser:
    """Separates thoughts and calls from the answer, while the text streams.

    Text outside messages, such as one that a grammar enforces or a continued answer, is the answer.
    """

    def __init__(self, use: ToolUse, special: frozenset[str] = frozenset()) -> None:
        self._use = use
        # A call has a recipient. Those of other forms are quoted.
        answer = ToolUse([], "none") if use.mode == "auto" else use
        self._answer = CallParser(answer, special)
        self._left = ""
        self._length = 0  # of the text so far
        self.thoughts: list[int] = []
        """Places in the text where thoughts begin and end, in turn."""
        self._header: str | None = None  # of the message that is read; None: the body of one
        self._channel = "final"
        self._recipient = ""

    @property
    def calls(self) -> int:
        return self._answer.calls

    def push(self, text: str) -> list[Part]:
        """Return the parts that became final with more text, in order."""
        self._left += text
        self._length += len(text)
        return list(self._read())

    def flush(self) -> list[Part]:
        parts = list(self._read())
        if self._header is None and self._recipient:  # a call without its end
            parts += [self._left] if self._left else []
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
                if self._channel == "analysis" or self._recipient:
                    self.thoughts.append(self._length - len(rest))
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
            if len(self.thoughts) % 2:
                self.thoughts.append(self._length - len(self._left))
            self._channel, self._recipient = "", ""  # between messages
            if limit[0] in _HEADERS:
                self._header = limit[0]

    def _begin(self, header: str) -> None:
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


AnswerParser: TypeAlias = ChannelParser | CallParser  # separates the parts of an answer
