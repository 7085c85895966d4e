"""Tables and numbers in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its frame."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    """Rounded, thousands parted; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def interval(figures: dict[str, Any]) -> str:
    """An accepted length and its interval."""
    low, high = figures["interval_95"]
    return f"{figures['accepted_length']:.2f} ({low:.2f} to {high:.2f})"
