"""Streamed text on the terminal, drafted tokens in colour."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from rich.console import Console

from paceline.client import Chunk


def print_chunk(console: Console, chunk: Chunk, style: str) -> None:
    """Print the text of a chunk, accepted drafted tokens in `style`."""
    pairs = zip(chunk.pieces, chunk.proposed_by, strict=False)
    for proposer, pieces in groupby(pairs, key=itemgetter(1)):
        text = "".join(piece for piece, _ in pieces)
        drafted = style if proposer == "drafter" else None
        console.out(text, style=drafted, highlight=False, end="")
