"""The table for the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show(found: dict[str, Any], console: Console) -> None:
    """Print a table for each cell."""
    for cell in found["cells"]:
        prefill = cell["prefill_seconds"]
        table = Table(
            title=f"{cell['group']}, T = {cell['temperature']:g}",
            caption=f"prompts: {cell['prompts']}, runs: {cell['runs']}; prefill "
            f"{prefill['paceline']:.1f} s, of transformers {prefill['transformers']:.1f} s; "
            f"Paceline's texts are {'identical' if cell['identical'] else 'NOT IDENTICAL'}",
        )
        headings = ("accepted", "without bonus", "tokens/s", "x none", "x none, always drafting")
        table.add_column("")
        for heading in (*headings, "x transformers", "x its best"):
            table.add_column(heading, justify="right")
        for name, row in cell["rows"].items():
            table.add_row(
                name,
                number(row.get("accepted_length")),
                number(row.get("accepted_length_without_bonus")),
                number(row["tokens_per_second"], 1),
                number(row["against_none"]),
                number(row.get("always")),
                number(row["against_transformers"]),
                number(row["against_transformers_best"]),
            )
        console.print(table)


def number(value: float | None, digits: int = 2) -> str:
    """Rounded; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"
