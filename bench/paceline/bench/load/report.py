"""What many generations at once came to: tables for the terminal, and a picture."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.load.turns import MODES, over


def show(figures: dict[str, Any], console: Console) -> None:
    """Print a table for each loop."""
    for loop, what in (("closed", "generations at once"), ("open", "arrivals a second")):
        if loop in figures:
            console.print(_table(f"{loop} loop, {figures['drafter']}", what, figures[loop]))


def _table(title: str, what: str, points: dict[str, Any]) -> Table:
    table = Table(title=title, caption="ms are medians, in brackets 99th percentiles")
    table.add_column(what, justify="right")
    table.add_column("mode")
    for heading in (
        *("tokens/s", "scheduled over it", "tokens/s a user", "first token ms", "a token ms"),
        "between messages ms",
        *("drafted share", "accepted", "drafted", "checked", "budget 0"),
    ):
        table.add_column(heading, justify="right")
    for size, modes in points.items():
        for mode in MODES:
            row = modes[mode]
            table.add_row(
                size,
                mode,
                f"{row['tokens_per_second']:.0f}",
                "" if mode == "scheduled" else f"{over(modes, mode):.2f}",
                _number(row["user_tokens_per_second"], "p50", 0),
                _times(row["first_token_ms"]),
                _times(row["per_token_ms"]),
                _times(row["between_messages_ms"]),
                f"{row['drafted_share']:.0%}",
                *(
                    "" if row[key] is None else f"{row[key]:.1f}"
                    for key in ("accepted_length", "drafted_nodes", "checked_nodes")
                ),
                "" if row["budget_0_share"] is None else f"{row['budget_0_share']:.0%}",
            )
    return table


def _number(spread: dict[str, float] | None, which: str, digits: int) -> str:
    return "" if spread is None else f"{spread[which]:.{digits}f}"


def _times(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{spread['p50']:.0f} ({spread['p99']:.0f})"


def draw(figures: dict[str, Any], axes: Sequence[Any]) -> None:
    """Two panels: throughput against what one user gets, and the nodes checked by load."""
    points, (left, right) = figures["closed"], axes
    for mode in MODES:
        rows = [modes[mode] for modes in points.values()]
        users = [row["user_tokens_per_second"]["p50"] for row in rows]
        total = [row["tokens_per_second"] for row in rows]
        left.plot(users, total, marker="o", label=mode)
    for size, modes in points.items():
        row = modes["scheduled"]
        at = (row["user_tokens_per_second"]["p50"], row["tokens_per_second"])
        left.annotate(size, at, textcoords="offset points", xytext=(5, 5), fontsize=8)
    left.set(xlabel="tokens/s of a user (median)", ylabel="tokens/s of all", title="Pareto")
    sizes = list(points)
    for mode in MODES[1:]:
        rows = [points[size][mode] for size in sizes]
        # Nodes checked for each token, rounds without a tree counted.
        shares = [
            (row["checked_nodes"] or 0.0) / (row["accepted_length"] or 1.0) * row["drafted_share"]
            for row in rows
        ]
        right.plot(sizes, shares, marker="o", label=mode)
    right.set(xlabel="generations at once", ylabel="nodes checked a token", title="Budget")
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
