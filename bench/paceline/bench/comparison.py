"""`paceline bench comparison`: whole requests by prompt set, beside transformers."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from paceline.bench.baseline import MODES, Transformers
from paceline.bench.models import Models
from paceline.bench.prompts import SETS, Prompt, demo_prompts
from paceline.bench.record import Results, digest, make_console
from paceline.bench.services import Sample, generate, overhead_ms, services
from paceline.client import RoundStats

PLAIN = "paceline none"

_PARTS: dict[str, Callable[[RoundStats], float]] = {
    "round_ms": lambda entry: entry.round_ms,
    "draft_ms": lambda entry: entry.draft_ms,
    "verify_ms": lambda entry: entry.verify_ms,
    "queue_ms": lambda entry: entry.queue_ms,
    "transport_ms": lambda entry: entry.transport_ms,
    "overhead_ms": overhead_ms,
}


@dataclass
class Runs:
    """All runs of one row on one prompt set. Rates in tokens per second, prefill included."""

    rates: list[float] = field(default_factory=list)
    against_greedy: list[float] = field(default_factory=list)
    against_plain: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    identical: bool = True

    def add(self, mode: str, rates: dict[str, float], samples: dict[str, Sample]) -> None:
        """Add one prompt, given the rates of all rows and the samples of Paceline's."""
        self.rates.append(rates[mode])
        self.against_plain.append(rates[mode] / rates[PLAIN])
        if MODES[0] in rates:
            self.against_greedy.append(rates[mode] / rates[MODES[0]])
        if mode in samples:
            self.samples.append(samples[mode])
            self.identical &= samples[mode].tokens == samples[PLAIN].tokens

    def summary(self) -> dict[str, Any]:
        """Medians over runs, the share of drafted tokens, and the parts of a drafted round."""
        figures: dict[str, Any] = {
            "runs": len(self.rates),
            "tokens_per_second": median(self.rates),
            "against_paceline_none": median(self.against_plain),
            "identical_to_paceline_none": self.identical,
        }
        if self.against_greedy:
            figures["against_transformers_greedy"] = median(self.against_greedy)
        if self.samples:
            written = sum(len(sample.tokens) for sample in self.samples)
            figures["rounds"] = sum(len(sample.stats.rounds) for sample in self.samples)
            figures["drafted_share"] = sum(s.stats.accepted for s in self.samples) / written
        rounds = [entry for sample in self.samples for entry in sample.drafted]
        if rounds:
            emitted = sum(entry.emitted for entry in rounds)
            figures["drafted_rounds"] = len(rounds)
            figures["accepted_length"] = emitted / len(rounds)
            figures["round"] = {name: median(map(part, rounds)) for name, part in _PARTS.items()}
        return figures


async def measure(
    models: Models,
    prompts: Sequence[Prompt],
    *,
    dtype: str,
    tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Continuations of `tokens` tokens by every row, prompt by prompt; summaries by set and row.

    Sampled prompts have no rows of transformers, which samples other tokens:
    rates would compare two texts.
    """
    baseline = Transformers(models.target, models.assistant, dtype)
    runs: dict[str, dict[str, Runs]] = defaultdict(lambda: defaultdict(Runs))
    drafters = ["none", *models.drafters]
    with services(models.target, models.drafters, dtype, verifier=["--share-weights"]) as pair:
        async with pair.client() as client:
            for mode in baseline.modes():
                baseline.generate(mode, prompts[0].tokens, 16)
            for drafter in drafters:
                await generate(client, prompts[0].tokens, 32, drafter)
            for index, prompt in enumerate([*prompts] * repeats):
                progress(f"{prompt.set}, run {index + 1} of {len(prompts) * repeats}")
                rates: dict[str, float] = {}
                samples: dict[str, Sample] = {}
                for mode in baseline.modes() if prompt.temperature == 0 else ():
                    _, seconds = baseline.generate(mode, prompt.tokens, tokens)
                    rates[mode] = tokens / seconds
                for drafter in drafters:
                    how = {"temperature": prompt.temperature, "seed": prompt.seed}
                    sample = await generate(client, prompt.tokens, tokens, drafter, **how)
                    rates[f"paceline {drafter}"] = tokens / sample.seconds
                    samples[f"paceline {drafter}"] = sample
                for mode in rates:
                    runs[prompt.set][mode].add(mode, rates, samples)
    return {
        name: {mode: found.summary() for mode, found in rows.items()} for name, rows in runs.items()
    }


_COLUMNS = {
    "tokens/s": "tokens_per_second",
    "x none": "against_paceline_none",
    "x transformers": "against_transformers_greedy",
    "accepted length": "accepted_length",
    "drafted share": "drafted_share",
}


def show(name: str, rows: dict[str, dict[str, Any]], console: Console) -> None:
    """Print a table of one prompt set."""
    parts = ("round_ms", "draft_ms", "verify_ms", "queue_ms", "transport_ms")
    table = Table(title=name, caption="ms are medians over drafted rounds")
    for heading in ("", *_COLUMNS, *(part.replace("_", " ") for part in parts), "identical"):
        table.add_column(heading, justify="right" if heading else "left")
    for mode, figures in rows.items():
        values = [figures.get(key) for key in _COLUMNS.values()]
        values += [figures.get("round", {}).get(part) for part in parts]
        cells = ("" if value is None else f"{value:.2f}" for value in values)
        table.add_row(mode, *cells, "yes" if figures["identical_to_paceline_none"] else "NO")
    console.print(table)


def run(args: argparse.Namespace) -> int:
    """Measure the prompt sets of `args.set`, by default all."""
    console = make_console()
    models = Models.of(args)
    sets = args.set or SETS
    prompts = [each for each in demo_prompts(models.prompts, models.target) if each.set in sets]
    folders = {"target": models.target, **models.trained}
    weights = {name: digest(folder) for name, folder in folders.items()}
    head = {"dtype": args.dtype, "tokens": args.tokens, "weights": weights}
    results = Results("comparison", args.output, **head)
    found = uvloop.run(
        measure(
            models,
            prompts,
            dtype=args.dtype,
            tokens=args.tokens,
            repeats=args.repeats,
            progress=console.log,
        )
    )
    for name, rows in found.items():
        results.add(name, {"rows": rows})
        show(name, rows, console)
    console.print(f"written to {results.file}")
    return 0
