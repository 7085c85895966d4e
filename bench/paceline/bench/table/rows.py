"""From runs to the rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.baseline import MODES
from paceline.bench.services import Sample

PLAIN = "paceline none"


def decode_rate(sample: Sample) -> float:
    """Tokens per second after the first token, and after the first round if that is drafted.

    A drafter reads the prompt in its first round, as an assistant of transformers does in its first
    step, which is left out as well.
    """
    stats = sample.stats
    tokens, milliseconds = len(sample.tokens) - 1, stats.total_ms - stats.first_token_ms
    if stats.rounds[0].drafted and len(stats.rounds) > 1:
        tokens -= stats.rounds[0].emitted
        milliseconds -= stats.rounds[0].round_ms
    return tokens / milliseconds * 1e3


@dataclass
class Turn:
    """One prompt through all rows.

    Attributes:
        rates: Tokens per second by row.
        adaptive: Paceline's rows, drafting where it pays.
        always: Paceline's rows with a drafter, drafting in every round.
    """

    rates: dict[str, float] = field(default_factory=dict)
    adaptive: dict[str, Sample] = field(default_factory=dict)
    always: dict[str, Sample] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether all of Paceline's rows have the same tokens."""
        texts = [sample.tokens for sample in (*self.adaptive.values(), *self.always.values())]
        return all(text == texts[0] for text in texts)


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """A cell as JSON: its rows, and whether Paceline's texts were identical in every turn."""
    return {
        "runs": len(turns),
        "identical": all(turn.identical for turn in turns),
        "rows": {name: _row(name, turns) for name in turns[0].rates},
    }


def _row(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    """Medians over turns, of ratios within a turn; `always` is against plain decoding too."""

    def against(other: str) -> float:
        return median(turn.rates[name] / turn.rates[other] for turn in turns)

    best = [max(turn.rates[mode] for mode in MODES if mode in turn.rates) for turn in turns]
    figures = {
        "tokens_per_second": median(turn.rates[name] for turn in turns),
        "against_none": against(PLAIN),
        "against_transformers": against(MODES[0]),
        "against_transformers_best": median(
            turn.rates[name] / rate for turn, rate in zip(turns, best, strict=True)
        ),
    }
    if name not in turns[0].always:
        return figures
    samples = [turn.always[name] for turn in turns]
    figures["always"] = median(
        decode_rate(sample) / turn.rates[PLAIN] for sample, turn in zip(samples, turns, strict=True)
    )
    rounds = [entry for sample in samples for entry in sample.drafted]
    figures["drafted_rounds"] = len(rounds)
    if rounds:
        figures["accepted_length"] = sum(entry.emitted for entry in rounds) / len(rounds)
        figures["draft_ms"] = median(entry.draft_ms for entry in rounds)
        figures["verify_ms"] = median(entry.verify_ms for entry in rounds)
        figures["first_round_ms"] = median(each.stats.rounds[0].round_ms for each in samples)
    return figures


_COLUMNS = {
    "accepted length": "accepted_length",
    "tokens/s": "tokens_per_second",
    "x none": "against_none",
    "x none, always drafting": "always",
    "x transformers": "against_transformers",
    "x its best": "against_transformers_best",
}


def show(name: str, cell: dict[str, Any], console: Console) -> None:
    """Print a cell."""
    prefill = cell["prefill_seconds"]
    table = Table(
        title=name,
        caption=f"{cell['prompts']} prompts, {cell['runs']} runs; accepted length counts the bonus "
        f"token; prefill {prefill['paceline']:.1f} s, transformers "
        f"{prefill['transformers']:.1f} s; Paceline's texts are "
        f"{'identical' if cell['identical'] else 'NOT IDENTICAL'}",
    )
    table.add_column("")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for row, figures in cell["rows"].items():
        values = (figures.get(key) for key in _COLUMNS.values())
        table.add_row(row, *("" if value is None else f"{value:.2f}" for value in values))
    console.print(table)
