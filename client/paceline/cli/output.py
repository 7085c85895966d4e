"""Output of commands that print texts of models and tables."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from paceline.client import Chunk


class Output(Console):
    """A console for text that is neither interpreted nor wrapped; settings as of rich's Console."""

    def __init__(self, **settings: Any) -> None:
        plain = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
        super().__init__(**{**plain, **settings})

    def on_broken_pipe(self) -> None:
        """Leaves the BrokenPipeError, which rich handles when it calls this, to `main`."""
        raise


def print_chunk(console: Console, chunk: Chunk, style: str) -> None:
    """Print the text of a chunk, accepted drafted tokens in `style`."""
    pairs = zip(chunk.pieces, chunk.proposed_by, strict=False)
    for proposer, pieces in groupby(pairs, key=itemgetter(1)):
        text = "".join(piece for piece, _ in pieces)
        drafted = style if proposer == "drafter" else None
        console.out(text, style=drafted, highlight=False, end="")
