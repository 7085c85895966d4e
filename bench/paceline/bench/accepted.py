"""Tables of accepted lengths."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rich.table import Table


def lengths(sets: dict[str, Any]) -> Table:
    """By context length; the bonus token is counted."""
    table = Table(
        title="accepted length, bonus included, by tokens of prompt (95% interval over texts)"
    )
    contexts = [part for part in _any_drafter(sets) if part.isdigit()]
    headings = ("texts", "T", "looping", "drafter", *contexts, "all", "without bonus", "no loops")
    for heading in headings:
        table.add_column(heading)
    for name, heat, cell in _cells(sets):
        for drafter, parts in cell["drafters"].items():
            table.add_row(
                name,
                heat,
                f"{cell['looping_texts']} of {cell['texts']}",
                drafter,
                *(_length(parts[context]) for context in contexts),
                _with_interval(parts["all"]),
                f"{parts['all']['accepted_length_without_bonus']:.2f}",
                _length(parts["not looping"]),
            )
    return table


def positions(sets: dict[str, Any]) -> Table:
    """Share of rounds whose token at a depth was accepted."""
    shown = 6
    table = Table(title="share of rounds whose drafted token stood, by its depth")
    for heading in ("texts", "T", "drafter", *map(str, range(1, shown + 1))):
        table.add_column(heading)
    for name, heat, cell in _cells(sets):
        for drafter, parts in cell["drafters"].items():
            shares = [f"{share:.2f}" for share in parts["all"]["by_position"][:shown]]
            table.add_row(name, heat, drafter, *shares)
    return table


def conditional(sets: dict[str, Any]) -> Table:
    """Acceptance of each depth among rounds in which those before it stood."""
    shown = 6
    table = Table(title="share of rounds whose token at a depth stood, of those that reached it")
    for heading in ("texts", "T", "drafter", *map(str, range(1, shown + 1))):
        table.add_column(heading)
    for name, heat, cell in _cells(sets):
        for drafter, parts in cell["drafters"].items():
            reached = [1.0, *parts["all"]["by_position"]]
            pairs = list(pairwise(reached))[:shown]
            shares = [f"{share / before:.2f}" if before else "-" for before, share in pairs]
            table.add_row(name, heat, drafter, *shares)
    return table


def coupling(sets: dict[str, Any]) -> Table:
    """Ways to accept at temperature 1."""
    table = Table(
        title="one LongSpec layer at T = 1: accepted length, bonus included (95% interval)"
    )
    table.add_column("way")
    for name in sets:
        table.add_column(f"{name} texts")
    for way in next(iter(sets.values())):
        table.add_row(way, *(_with_interval(ways[way]) for ways in sets.values()))
    return table


def policies(sets: dict[str, Any]) -> Table:
    """Selections of the target's own KV at one budget."""
    table = Table(title="selfspec: accepted length, bonus included (95% interval over texts)")
    for heading in ("policy", *(f"{n} {heat}" for n, heats in sets.items() for heat in heats)):
        table.add_column(heading)
    cells = [cell for heats in sets.values() for cell in heats.values()]
    for name in cells[0]:
        table.add_row(name, *(_with_interval(cell[name]) for cell in cells))
    return table


def _cells(sets: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, heats in sets.items():
        for heat, cell in heats.items():
            yield name, heat.removeprefix("T="), cell


def _any_drafter(sets: dict[str, Any]) -> dict[str, Any]:
    _, _, cell = next(_cells(sets))
    found: dict[str, Any] = next(iter(cell["drafters"].values()))
    return found


def _length(figures: dict[str, Any]) -> str:
    return f"{figures['accepted_length']:.2f}" if figures else "-"


def _with_interval(figures: dict[str, Any]) -> str:
    if not figures:
        return "-"
    low, high = figures["interval_95"]
    return f"{figures['accepted_length']:.2f} ({low:.2f} to {high:.2f})"
