"""Which pictures go with which results."""

from collections.abc import Callable
from typing import Any

from paceline.bench import budget_report
from paceline.bench.load import report as load_report
from paceline.bench.page.plots import by_context, by_temperature, svg

_RATIO = "tokens/s over no drafter"
_LENGTH = "accepted length, bonus included"


def _table(found: dict[str, Any]) -> list[str]:
    long = [cell for cell in found["cells"] if cell["context"]]
    drawn: list[str] = []
    if long:
        drawn.append(by_context(long, "against_none", _RATIO))
        drawn.append(by_context(long, "accepted_length", _LENGTH))
    for target in dict.fromkeys(cell["target"] for cell in found["cells"]):
        here = [cell for cell in found["cells"] if cell["target"] == target]
        drawn.append(by_temperature(here, "accepted_length", _LENGTH))
        drawn.append(by_temperature(here, "against_transformers", "tokens/s over transformers"))
    return drawn


def load(found: dict[str, Any]) -> list[str]:
    """Throughput and node budget of the closed loop."""
    if "closed" not in found:
        return []
    return [svg("load", 2, lambda _, axes: load_report.draw(found, axes))]


def budgets(rows: list[dict[str, Any]]) -> list[str]:
    """Accepted length by KV budget."""
    columns = len(budget_report.contexts_of(rows))
    return [svg("budgets", columns, lambda _, axes: budget_report.plot(rows, axes))]


def _server(found: dict[str, Any]) -> list[str]:
    def draws(_: Any, axes: Any) -> None:
        for axis, (heat, rows) in zip(axes, found["temperatures"].items(), strict=True):
            rates = [row["tokens_per_second"] for row in rows.values()]
            axis.barh(list(rows), rates)
            axis.set(title=f"T = {heat}", xlabel="tokens/s, prompt included")

    return [svg("server", len(found["temperatures"]), draws)]


PICTURES: dict[str, Callable[[Any], list[str]]] = {
    "table": _table,
    "load": load,
    "server": _server,
    "budgets": budgets,
}
