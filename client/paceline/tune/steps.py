"""The settings to measure, the choice among them, and the results."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.bar import Bar
from rich.table import Table

_BAR = 40  # columns

RATIOS = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.5)
"""Sparse ratios of the first sweep: the share of the text's KV that drafting reads."""

DEPTHS = (2, 3, 4, 5, 6, 8, 10, 14)
"""Drafted tokens of a chain."""

NEIGHBOURS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Ratios of the last sweep, as multiples of the ratio chosen in the first."""

TREES = (
    ("4", 4), ("8", 8), ("4,4", 6), ("8,8", 10), ("8,8,8", 12), ("8,8,8", 16),
    ("4,8,8,8", 16), ("8,8,8,8", 24), ("4,8,8,8,8", 36),
)  # fmt: skip
"""Widths of a tree's levels, and its node limit."""

STABLE = 0.97
"""An accepted length is stable from this share of the best one on."""

MIN_CONTEXT = 32
"""Minimum number of positions that drafting reads. Unit: tokens."""

METHODS = ("selfspec", "longspec", "lm")
"""Methods with settings to tune."""


class TuneError(Exception):
    """A drafter cannot be tuned, or drafts nothing."""


@dataclass(frozen=True)
class TuningRun:
    """Result of one setting on all prompts."""

    options: dict[str, str]
    accepted_length: float
    """Mean number of tokens emitted in a drafted round, the bonus token included."""
    tokens_per_second: float
    """Speed after the first token."""

    @property
    def label(self) -> str:
        """The options in one line."""
        return " ".join(f"{name}={value}" for name, value in self.options.items())


@dataclass(frozen=True)
class TuningStep:
    """One sweep."""

    title: str
    runs: list[TuningRun]
    chosen: TuningRun


Measure = Callable[[Mapping[str, str]], Awaitable[TuningRun]]
"""Measures a drafter with these options added to its own."""


async def tune(method: str, measure: Measure) -> list[TuningStep]:
    """Runs all steps of a method. The setting chosen in the last one is the result.

    `selfspec` (SpecAttn, section 3.4): the smallest sparse ratio with a stable accepted length, at
    the longest chain; then the fastest chain length at that ratio; then the fastest ratio near it
    at that length. Other methods: the fastest shape of the tree.

    Raises:
        TuneError: The method has no settings to tune.
    """
    if method == "selfspec":
        return await _chain(measure)
    if method in METHODS:
        options = [{"widths": widths, "max_nodes": str(nodes)} for widths, nodes in TREES]
        return [_fastest("shape of the tree", await _sweep(measure, options))]
    raise TuneError(
        f"{method!r} has no settings to tune: give METHOD:DIR with one of {', '.join(METHODS)}"
    )


async def _chain(measure: Measure) -> list[TuningStep]:
    def setting(ratio: float, depth: int) -> dict[str, str]:
        return {"ratio": f"{ratio:.3g}", "context": str(MIN_CONTEXT), "depth": str(depth)}

    first = await _sweep(measure, [setting(ratio, max(DEPTHS)) for ratio in RATIOS])
    best = max(run.accepted_length for run in first)
    stable = next(run for run in first if run.accepted_length >= STABLE * best)
    ratio = float(stable.options["ratio"])
    by_depth = _fastest(
        "drafted tokens", await _sweep(measure, [setting(ratio, depth) for depth in DEPTHS])
    )
    depth = int(by_depth.chosen.options["depth"])
    near = [setting(min(1.0, ratio * factor), depth) for factor in NEIGHBOURS]
    return [
        TuningStep("sparse ratio, long chains", first, stable),
        by_depth,
        _fastest("sparse ratio, refined", await _sweep(measure, near)),
    ]


async def _sweep(measure: Measure, settings: Iterable[Mapping[str, str]]) -> list[TuningRun]:
    return [await measure(setting) for setting in settings]


def _fastest(title: str, runs: list[TuningRun]) -> TuningStep:
    return TuningStep(title, runs, max(runs, key=lambda run: run.tokens_per_second))


def to_toml(
    verifier: Mapping[str, str | bool], load: str, steps: Sequence[TuningStep], baseline: float
) -> str:
    """A config file for `paceline serve`, `paceline verifier` and `paceline drafter`.

    Args:
        verifier: Arguments of the verifier by their long names.
        load: The drafter, NAME=METHOD:DIR,key=value...
        steps: All steps; the drafter has the settings chosen in the last one.
        baseline: Speed without a drafter. Unit: tokens/s.
    """
    best = steps[-1].chosen
    lines = [
        f"# Found by paceline tune: {best.tokens_per_second:.1f} tokens/s, accepted length "
        f"{best.accepted_length:.2f}; {baseline:.1f} tokens/s without a drafter.",
    ]
    if best.tokens_per_second < baseline:
        lines.append("# Drafting does not pay with these prompts here: services will not draft.")
    lines += ["", "[verifier]", *(f"{key} = {json.dumps(v)}" for key, v in verifier.items())]
    lines += ["", "[drafter]", f"load = [{json.dumps(load)}]", ""]
    return "\n".join(lines)


def to_table(step: TuningStep, baseline: float) -> Table:
    """The runs of a step with their speeds as bars; `baseline` as in `to_toml`."""
    table = Table(title=step.title)
    table.add_column("setting")
    for heading in ("accepted length", "tokens/s", "speed-up"):
        table.add_column(heading, justify="right")
    table.add_column("", min_width=_BAR)
    table.add_column("")
    fastest = max(run.tokens_per_second for run in step.runs)
    for run in step.runs:
        speed = run.tokens_per_second
        table.add_row(
            run.label,
            f"{run.accepted_length:.2f}",
            f"{speed:.1f}",
            f"{speed / baseline:.2f}x",
            Bar(fastest, 0, speed, width=_BAR),
            "chosen" if run is step.chosen else "",
        )
    return table
