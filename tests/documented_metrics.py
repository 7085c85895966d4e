"""The tables of docs/metrics.md, beside what a registry has."""

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented(section: str) -> set[tuple[str, str]]:
    """Names of a section's table, as Prometheus shows them, and their kinds. A row with several
    names has one kind, or one for each."""
    text = DOCUMENT.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    metrics: set[tuple[str, str]] = set()
    for row in re.findall(r"^\| (`.*)\|$", text, re.MULTILINE):
        names, kinds = (cell.strip() for cell in row.split("|")[:2])
        listed, kind = re.findall(r"`(\w+)`", names), kinds.split(", ")
        metrics |= set(zip(listed, kind * len(listed) if len(kind) == 1 else kind, strict=False))
    return metrics


def described(families: Iterable[Metric]) -> set[tuple[str, str]]:
    """Names, as Prometheus shows them, and kinds of metrics, but for those of the process."""
    return {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type)
        for family in families
        if not family.name.startswith(("process_", "python_"))
    }
