"""Table and plot of accepted lengths under KV budgets."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from paceline.bench.budgets import spreads


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Drafter, policy and context by budget; the bonus token is counted."""
    budgets = sorted({row["budget"] for row in rows}, key=lambda budget: budget or float("inf"))
    shown = Table(title="accepted length by KV budget, bonus included; texts after held-out files")
    for heading in ("context", "RoPE", "drafter", "policy", *map(_name, budgets), "spread"):
        shown.add_column(heading)
    lengths = {
        (row["context"], row["drafter"], row["policy"], row["budget"]): row["accepted_length"]
        for row in rows
    }
    ropes = {row["context"]: row["rope"] for row in rows}
    for entry in spreads(rows):
        context, drafter, policy = entry["context"], entry["drafter"], entry["policy"]
        cells = []
        for budget in budgets:
            found = lengths.get((context, drafter, policy if budget else "all", budget))
            cells.append("" if found is None else f"{found:.2f}")
        spread = f"{entry['spread']:.0%}"
        shown.add_row(f"{context:,}", ropes[context], drafter, policy, *cells, spread)
    return shown


def remote_table(ways: Mapping[str, Mapping[str, Any]]) -> Table:
    """A followed KV beside a mapped one."""
    shown = Table(title="longspec with the target's KV mapped and followed, at 8k tokens")
    for heading in ("way", "accepted", "of map, all", "first KiB", "KiB a round", "of the layer"):
        shown.add_column(heading)
    for way, figures in ways.items():
        shown.add_row(
            way,
            f"{figures['accepted_length']:.2f}",
            f"{figures['share_of_map_all']:.0%}",
            f"{figures['first_kv_bytes'] / 1024:.1f}",
            f"{figures['kv_bytes_a_round'] / 1024:.1f}",
            f"{figures['kv_share']:.2%}",
        )
    return shown


def plot(rows: Sequence[Mapping[str, Any]], panels: Sequence[Any]) -> None:
    """A panel for each context."""
    contexts = contexts_of(rows)
    for panel, context in zip(panels, contexts, strict=True):
        here = [row for row in rows if row["context"] == context]
        for drafter, policy in dict.fromkeys((r["drafter"], r["policy"]) for r in here):
            if policy == "all":
                continue
            points = [
                (row["budget"] or context, row["accepted_length"])
                for row in here
                if row["drafter"] == drafter and row["policy"] in (policy, "all")
            ]
            points.sort()
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, label=f"{drafter}, {policy}")
        panel.set_xscale("log", base=2)
        panel.set_title(f"{context:,} tokens")
        panel.set_xlabel("KV budget, tokens (last: all)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accepted length, bonus included")
    panels[-1].legend(fontsize=6)


def contexts_of(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those that were measured, the shortest first."""
    return sorted({row["context"] for row in rows})


def _name(budget: int) -> str:
    return f"{budget:,}" if budget else "all"
