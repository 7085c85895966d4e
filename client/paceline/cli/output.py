"""Output of commands that print texts of models and tables."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from paceline.client import Chunk

WIDE = 1000  # columns of a wide table: a long line is easier to read than columns cut short


class Output(Console):
    """A console for text that is neither interpreted nor wrapped; settings as of rich's Console."""

    def __init__(self, **settings: Any) -> None:
        plain = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
        super().__init__(**{**plain, **settings})

    def on_broken_pipe(self) -> None:
        """Leave the BrokenPipeError, which rich handles when it calls this, to `main`."""
        raise


class AnswerPrinter:
    """Prints an answer while it comes: its thoughts dim and without their marks, and accepted
    drafted tokens in `style`. `marks` and `thought` are as of the gateway's `Answer`."""

    def __init__(
        self, console: Console, style: str, marks: Collection[str] = (), thought: str = ""
    ) -> None:
        from paceline.gateway.channels import Answer
        from paceline.gateway.requests import ToolUse

        self._console, self._style = console, style
        self._parts = Answer(ToolUse([], "none"), frozenset(marks), thought)
        self._pending = ""  # text that is not printed yet, with its marks
        self._drafted: list[bool] = []  # for each of its characters
        self.text = self.thoughts = ""
        self.begun = False  # whether something came

    def push(self, chunk: Chunk) -> None:
        self.begun = True
        for piece, proposer in zip(chunk.pieces, chunk.proposed_by, strict=False):
            self._drafted += [proposer == "drafter"] * len(piece)
        self._pending += chunk.text
        self._drafted += [False] * (len(self._pending) - len(self._drafted))
        self._print(self._parts.push([chunk]))

    def end(self) -> None:
        """Print what was kept back, and end the line."""
        self._print(self._parts.flush())
        if self.text or self.thoughts:
            self._console.print()

    def _print(self, parts: list[Any]) -> None:
        for part in parts:
            text = part if isinstance(part, str) else part.text
            at = max(0, self._pending.find(text))
            drafted = self._drafted[at : at + len(text)] + [False] * len(text)
            self._pending = self._pending[at + len(text) :]
            self._drafted = self._drafted[at + len(text) :]
            if text is not part:
                self.thoughts += text
                self._console.out(text, style="dim", highlight=False, end="")
                continue
            if self.thoughts and not self.text:
                self._console.print("\n")
            self.text += text
            for is_drafted, pairs in groupby(zip(drafted, text, strict=False), itemgetter(0)):
                style = self._style if is_drafted else None
                shown = "".join(letter for _, letter in pairs)
                self._console.out(shown, style=style, highlight=False, end="")
