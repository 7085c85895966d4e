"""The results table: every method, context and temperature."""

from collections.abc import Iterator
from typing import Any

from paceline.bench.docs.markdown import number, table
from paceline.bench.docs.results import Results

_NAMES = {
    "transformers greedy": "transformers, plain",
    "transformers prompt lookup": "transformers, prompt lookup",
    "transformers assisted": "transformers, assisted",
    "paceline none": "Paceline, no drafter",
}
_MISSING = "Not recorded yet: `make bench` measures it."
_TARGETS = {
    "demo": "Demo target (14 M parameters)",
    "stretched": "Stretched target (the same function at the cost of 0.4 billion parameters)",
}


def machine(results: Results) -> str:
    """What the figures were measured on."""
    found = results.machine
    return (
        f"{found['cores']} cores of an {found['processor']} "
        f"({', '.join(found['isa'])}), torch {found['packages']['torch']}, "
        f"transformers {found['packages']['transformers']}"
    )


def summary(results: Results) -> str:
    """For README: a table for each target and temperature, prompts side by side."""
    if not results.has("table"):
        return _MISSING
    parts = []
    for target, temperature, cells in _columns(results):
        headings = ["", *map(_column, cells)]
        rows = []
        for name in cells[0]["rows"]:
            found = [cell["rows"][name] for cell in cells]
            rows.append([_name(name), *map(_figures, found)])
        parts.append(f"**{_TARGETS[target]}, T = {temperature:g}**\n\n{table(headings, rows)}")
    return "\n\n".join(parts)


def whole(results: Results) -> str:
    """All columns of all cells."""
    if not results.has("table"):
        return _MISSING
    parts = []
    for cell in results.value("table", "table/cells"):
        prefill = cell["prefill_seconds"]
        rows = [
            [
                _name(name),
                number(row.get("accepted_length")),
                number(row.get("accepted_length_without_bonus")),
                number(row["tokens_per_second"], 1),
                number(row["against_none"]),
                number(row.get("always")),
                number(row["against_transformers"]),
                number(row["against_transformers_best"]),
                number(row.get("draft_ms"), 1),
                number(row.get("verify_ms"), 1),
            ]
            for name, row in cell["rows"].items()
        ]
        headings = (
            *("", "accepted length", "without bonus", "tokens/s", "x no drafter"),
            *("x no drafter, always drafting", "x transformers", "x its best", "draft ms"),
            "verification ms",
        )
        yarn = f", RoPE scaled by YaRN x{cell['yarn']}" if cell["yarn"] else ""
        parts.append(
            f"### {cell['group'].capitalize()}, T = {cell['temperature']:g}\n\n"
            f"Prompts: {cell['prompts']}, of {cell['prompt_tokens']:,.0f} tokens (median){yarn}; "
            f"runs: {cell['runs']}. Prefill {prefill['paceline']:.1f} s, of transformers "
            f"{prefill['transformers']:.1f} s. Paceline's texts "
            f"{'identical in all rows' if cell['identical'] else 'NOT IDENTICAL'}."
            f"\n\n{table(headings, rows)}"
        )
    return "\n\n".join(parts)


def _columns(results: Results) -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
    """Cells by target and temperature: sets of short prompts, then contexts."""
    cells = results.value("table", "table/cells")
    for target in dict.fromkeys(cell["target"] for cell in cells):
        for temperature in dict.fromkeys(cell["temperature"] for cell in cells):
            found = [c for c in cells if (c["target"], c["temperature"]) == (target, temperature)]
            yield target, temperature, sorted(found, key=lambda cell: int(cell["context"]))


def _column(cell: dict[str, Any]) -> str:
    return f"{cell['context'] // 1024}k" if cell["context"] else str(cell["set"])


def _name(row: str) -> str:
    return _NAMES.get(row, f"`{row.removeprefix('paceline ')}`")


def _figures(row: dict[str, Any]) -> str:
    """Accepted length with and without bonus; the three ratios."""
    length = ""
    if "accepted_length" in row:
        length = f"{row['accepted_length']:.2f} ({row['accepted_length_without_bonus']:.2f}); "
    ratios = ("against_none", "against_transformers", "against_transformers_best")
    return length + " / ".join(f"{row[ratio]:.2f}" for ratio in ratios)
