"""Which settings are tried, and which of them is chosen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

RATIOS = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.25, 0.5)
"""Sparse ratios of the first sweep: KV that drafting reads, as a share of the text."""

DEPTHS = (2, 3, 4, 5, 6, 8, 10, 14)
"""Drafted tokens of a chain."""

NEIGHBOURS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""The last sweep's ratios, as multiples of the first one's choice."""

TREES = (
    ("4", 4), ("8", 8), ("4,4", 6), ("8,8", 10), ("8,8,8", 12), ("8,8,8", 16),
    ("4,8,8,8", 16), ("8,8,8,8", 24), ("4,8,8,8,8", 36),
)  # fmt: skip
"""Widths of a tree's levels, and its most nodes."""

STABLE = 0.97
"""Share of the best accepted length from which on it counts as stable."""

LEAST_CONTEXT = 32
"""Positions read however short the text. Unit: tokens."""

METHODS = ("selfspec", "longspec", "lm")
"""Methods that have something to tune."""


class TuneError(Exception):
    """It cannot be tuned as asked; the message says what to do."""


@dataclass(frozen=True)
class Trial:
    """What one setting came to on all prompts."""

    options: dict[str, str]
    accepted_length: float
    """Tokens a drafted round, the verifier's own included."""
    tokens_per_second: float
    """Of the time after the first token."""

    @property
    def label(self) -> str:
        """The options, shortly."""
        return " ".join(f"{name}={value}" for name, value in self.options.items())


@dataclass(frozen=True)
class Step:
    """One sweep."""

    title: str
    trials: list[Trial]
    chosen: Trial


Measure = Callable[[Mapping[str, str]], Awaitable[Trial]]
"""Tries a drafter with options besides its own."""


async def tune(method: str, measure: Measure) -> list[Step]:
    """All steps of a method; the last one's choice is the result.

    `selfspec`: SpecAttn, section 3.4. The sparse ratio from which on the accepted length is stable,
    with chains as long as any that are tried; the length of the chain that is fastest at that
    ratio; and the ratio near it that is fastest at that length. Others: the shape of the tree.

    Raises:
        TuneError: There is nothing to tune about the method.
    """
    if method == "selfspec":
        return await _chain(measure)
    if method in METHODS:
        options = [{"widths": widths, "max_nodes": str(nodes)} for widths, nodes in TREES]
        return [_fastest("shape of the tree", await _sweep(measure, options))]
    raise TuneError(
        f"there is nothing to tune about {method!r}; tune one of {', '.join(METHODS)}, named as "
        "METHOD:DIR"
    )


async def _chain(measure: Measure) -> list[Step]:
    def setting(ratio: float, depth: int) -> dict[str, str]:
        return {"ratio": f"{ratio:.3g}", "context": str(LEAST_CONTEXT), "depth": str(depth)}

    first = await _sweep(measure, [setting(ratio, max(DEPTHS)) for ratio in RATIOS])
    most = max(trial.accepted_length for trial in first)
    stable = next(trial for trial in first if trial.accepted_length >= STABLE * most)
    ratio = float(stable.options["ratio"])
    by_depth = _fastest(
        "drafted tokens", await _sweep(measure, [setting(ratio, depth) for depth in DEPTHS])
    )
    depth = int(by_depth.chosen.options["depth"])
    near = [setting(min(1.0, ratio * factor), depth) for factor in NEIGHBOURS]
    return [
        Step("sparse ratio, long chains", first, stable),
        by_depth,
        _fastest("sparse ratio again", await _sweep(measure, near)),
    ]


async def _sweep(measure: Measure, settings: Iterable[Mapping[str, str]]) -> list[Trial]:
    return [await measure(setting) for setting in settings]


def _fastest(title: str, trials: list[Trial]) -> Step:
    return Step(title, trials, max(trials, key=lambda trial: trial.tokens_per_second))
