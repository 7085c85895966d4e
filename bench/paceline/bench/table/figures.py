"""From samples to figures: medians with intervals, ratios within a prompt, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from paceline.bench.table.engines import AHEAD, ALWAYS_END, NONE, Answer, digest

Sample = dict[str, Any]  # of one group of requests; see `sample`
Cell = dict[str, dict[str, Any]]  # by contestant, `samples` by number of the group, and `figures`
_RESAMPLES = 1000
# Figures that are means over steps, and the field of a sample that has their total.
_A_STEP = {"checked_a_step": "checked", "draft_ms": "draft_ms", "step_ms": "verify_ms"}


def sample(answers: Sequence[Answer], prompts: Sequence[list[int]]) -> Sample:
    """Return the figures of one request, or of several at a time.

    The rate counts tokens after the first over the time from the first token to the last.
    """
    tokens, stats = sum(answer.tokens for answer in answers), [answer.stats for answer in answers]
    seconds = max(answer.ended for answer in answers) - min(answer.first for answer in answers)
    return {
        "prompt_tokens": round(median(map(len, prompts))),
        "tokens": tokens,
        "rate": round((tokens - 1) / seconds, 2) if tokens > 1 else None,
        "first_s": round(median(answer.first_seconds for answer in answers), 4),
        "rounds": sum(stat.drafted_rounds for stat in stats),
        "drafted": sum(entry.emitted for stat in stats for entry in stat.rounds if entry.drafted),
        "checked": sum(stat.checked for stat in stats),
        "steps": sum(stat.steps for stat in stats),
        "draft_ms": round(sum(stat.draft_ms for stat in stats), 2),
        "verify_ms": round(sum(stat.verify_ms for stat in stats), 2),
        "output": digest("\n".join(answer.output for answer in answers)),
    }


def summarize(cell: Cell) -> None:
    """Fill in the figures of every contestant.

    ``over_better`` compares a drafter with the better of none and a draft in every round,
    ``over_after`` drafting ahead with drafting after the step.
    """
    for name, entry in cell.items():
        samples = entry["samples"]
        figures = {
            "runs": len(samples),
            "tokens": sum(sample["tokens"] for sample in samples.values()),
            "tokens_per_second": interval(_rates(cell, name).values()),
            "first_token_s": interval(sample["first_s"] for sample in samples.values()),
        }
        if rounds := sum(sample["rounds"] for sample in samples.values()):
            figures["accepted_length"] = sum(s["drafted"] for s in samples.values()) / rounds
        if steps := sum(sample.get("steps", 0) for sample in samples.values()):
            for figure, total in _A_STEP.items():
                summed = sum(sample.get(total, 0) for sample in samples.values())
                figures[figure] = round(summed / steps, 3)
        plain = _plain(name)
        if plain in cell and plain != name:
            shared = samples.keys() & cell[plain]["samples"].keys()
            same = [_output(cell, name, group) == _output(cell, plain, group) for group in shared]
            figures |= {"over_none": ratio(cell, name, plain), "same_output": sum(same)}
            figures["compared"] = len(same)
        after = name.removesuffix(AHEAD) + ALWAYS_END
        if name.endswith(AHEAD) and after in cell:
            figures["over_after"] = ratio(cell, name, after)
        entry["figures"] = figures
    for name, entry in cell.items():
        fixed = [mode for mode in (_plain(name), f"{name}{ALWAYS_END}") if mode in cell]
        if name != _plain(name) and len(fixed) == 2 and all(_rates(cell, mode) for mode in fixed):
            better = max(fixed, key=lambda mode: _rate(cell, mode))
            entry["figures"]["over_better"] = ratio(cell, name, better)


def interval(values: Any) -> list[float] | None:
    """Lower end, median and upper end: a 95% bootstrap interval of the median.

    Returns None without values.
    """
    array = np.array(list(values))
    if not len(array):
        return None
    draws = np.random.default_rng(1).choice(array, (_RESAMPLES, len(array)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return [round(float(value), 3) for value in (low, np.median(array), high)]


def ratio(cell: Cell, name: str, other: str) -> list[float] | None:
    """Return the interval of one contestant's rate over another's on the same prompts."""
    ours, theirs = _rates(cell, name), _rates(cell, other)
    return interval(ours[key] / theirs[key] for key in ours.keys() & theirs.keys())


def table(title: str, cell: Cell) -> Table:
    columns = (
        "runs",
        "tokens/s",
        "95% interval",
        "times plain",
        "times the better of plain and always",
        "time to first token, s",
        "accepted length",
        "same output",
    )
    table = Table("", *columns, title=title)
    for name, entry in cell.items():
        figures = entry["figures"]
        rate, over, better, first = (
            figures.get(key) or ()
            for key in ("tokens_per_second", "over_none", "over_better", "first_token_s")
        )
        table.add_row(
            name,
            str(figures["runs"]),
            _number(rate, 1, ".1f"),
            f"{_number(rate, 0, '.1f')} to {_number(rate, 2, '.1f')}",
            _number(over, 1, ".2f"),
            _number(better, 1, ".2f"),
            _number(first, 1, ".2f"),
            f"{figures['accepted_length']:.2f}" if "accepted_length" in figures else "",
            f"{figures['same_output']} of {figures['compared']}" if "compared" in figures else "",
        )
    return table


def _number(values: Sequence[float], place: int, form: str) -> str:
    return format(values[place], form) if values else ""


def _rate(cell: Cell, name: str) -> float:
    return float(cell[name]["figures"]["tokens_per_second"][1])


def _rates(cell: Cell, name: str) -> dict[str, float]:
    """Return tokens per second by group, where an answer has more than one token."""
    samples = cell[name]["samples"]
    return {key: sample["rate"] for key, sample in samples.items() if sample["rate"]}


def _output(cell: Cell, name: str, group: str) -> str:
    return str(cell[name]["samples"][group]["output"])


def _plain(name: str) -> str:
    return " ".join([*name.split()[:2], NONE])
