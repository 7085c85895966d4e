"""The settings to measure, and the choice among them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

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

LEAST_CONTEXT = 32
"""Least number of positions that drafting reads. Unit: tokens."""

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
class Step:
    """One sweep."""

    title: str
    runs: list[TuningRun]
    chosen: TuningRun


Measure = Callable[[Mapping[str, str]], Awaitable[TuningRun]]
"""Measures a drafter with these options added to its own."""


async def tune(method: str, measure: Measure) -> list[Step]:
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


async def _chain(measure: Measure) -> list[Step]:
    def setting(ratio: float, depth: int) -> dict[str, str]:
        return {"ratio": f"{ratio:.3g}", "context": str(LEAST_CONTEXT), "depth": str(depth)}

    first = await _sweep(measure, [setting(ratio, max(DEPTHS)) for ratio in RATIOS])
    most = max(run.accepted_length for run in first)
    stable = next(run for run in first if run.accepted_length >= STABLE * most)
    ratio = float(stable.options["ratio"])
    by_depth = _fastest(
        "drafted tokens", await _sweep(measure, [setting(ratio, depth) for depth in DEPTHS])
    )
    depth = int(by_depth.chosen.options["depth"])
    near = [setting(min(1.0, ratio * factor), depth) for factor in NEIGHBOURS]
    return [
        Step("sparse ratio, long chains", first, stable),
        by_depth,
        _fastest("sparse ratio, refined", await _sweep(measure, near)),
    ]


async def _sweep(measure: Measure, settings: Iterable[Mapping[str, str]]) -> list[TuningRun]:
    return [await measure(setting) for setting in settings]


def _fastest(title: str, runs: list[TuningRun]) -> Step:
    return Step(title, runs, max(runs, key=lambda run: run.tokens_per_second))
