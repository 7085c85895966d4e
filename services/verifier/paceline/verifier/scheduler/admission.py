"""The search for the nodes that are worth their place in a batch (DSpark 3.2.2 and 5.2).

A step that checks no node emits one token a sequence. Each node adds its survival, the chance that
it is accepted, to what the step is expected to emit, and its cost to what the step takes. Survival
never rises along a path, so the nodes of all trees, sorted by survival, can be admitted from the
front and every cut leaves valid trees. What is left to find is the cut with most tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class StepCosts(Protocol):
    """What steps cost."""

    def seconds(self, tokens: Floats, attended: Floats, /) -> Floats:
        """Time of steps with so many batch tokens that attend to so many KV tokens: ``[n]``."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """The step as it is without any drafted node.

    Attributes:
        tokens: Tokens in it: one anchor for each sequence, and pieces of prompts.
        attended: KV tokens that they attend to, summed over them. Unit: tokens.
        emitted: Tokens it emits, one a sequence.
        idle: Time lost before it, whatever is admitted: the engine waited for trees. Unit: seconds.
    """

    tokens: int
    attended: int
    emitted: int
    idle: float = 0.0


def admit(
    survivals: Sequence[Floats],
    contexts: Sequence[int],
    step: Step,
    costs: StepCosts,
    *,
    exponents: Sequence[float] | None = None,
    causal: bool = False,
) -> list[int]:
    """Choose how many of the likeliest nodes of several trees to admit for most tokens per second.

    Args:
        survivals: Chance of each node to be accepted, falling, one array a tree, parents before
            their children.
        contexts: KV tokens that each node of a tree attends to, one number a tree.
        step: What else is in the step.
        costs: What steps cost.
        exponents: To correct each tree's survivals with; None: they are right.
        causal: Stop where the throughput first fails to rise, as Algorithm 1 does. Then no decision
            on a node depends on it or on what was drafted after it, which rejection sampling needs
            to stay exact (appendix A). Without it all cuts are compared: exact for the
            drafter-invariant contract only, and better where costs are jagged.

    Returns:
        Nodes admitted of each tree, from its front.
    """
    sizes = [len(each) for each in survivals]
    owners = np.repeat(np.arange(len(sizes)), sizes)
    gains: Floats = np.concatenate(survivals) if sizes else np.empty(0)
    if exponents is not None:
        gains = gains ** np.asarray(exponents, np.float64)[owners]
    order = np.argsort(-gains, kind="stable")  # equal ones stay parents first
    owners, gains = owners[order], gains[order]
    expected = _sums(step.emitted, gains)
    tokens = np.arange(step.tokens, step.tokens + len(gains) + 1, dtype=np.float64)
    attended = _sums(step.attended, np.asarray(contexts, np.float64)[owners])
    rates: Floats = expected / (step.idle + costs.seconds(tokens, attended))
    cut = int(rates.argmax())
    if causal:
        falls = np.flatnonzero(rates[1:] <= rates[:-1])
        cut = int(falls[0]) if len(falls) else len(gains)
    counts: list[int] = np.bincount(owners[:cut], minlength=len(sizes)).tolist()
    return counts


def _sums(first: float, terms: Floats) -> Floats:
    """``first``, and after each term the sum so far."""
    sums: NDArray[Any] = np.empty(len(terms) + 1)
    sums[0] = first
    np.cumsum(terms, out=sums[1:])
    sums[1:] += first
    return sums
