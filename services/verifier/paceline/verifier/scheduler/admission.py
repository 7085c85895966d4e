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


@dataclass(frozen=True, slots=True)
class Admission:
    """How many nodes of each tree are admitted, its likeliest ones, and what that promises.

    Attributes:
        counts: Nodes admitted of each tree, from its front.
        expected: Tokens the step is expected to emit.
        seconds: Time the step is expected to take, without the idle time before it.
    """

    counts: list[int]
    expected: float
    seconds: float


class Candidates:
    """The nodes of several trees, likeliest first."""

    def __init__(
        self,
        survivals: Sequence[Floats],
        contexts: Sequence[int],
        exponents: Sequence[float] | None = None,
    ) -> None:
        """Sort them.

        Args:
            survivals: Chance of each node to be accepted, falling, one array a tree, parents
                before their children.
            contexts: KV tokens that each node of a tree attends to, one number a tree.
            exponents: To correct each tree's survivals with; None: they are right.
        """
        sizes = [len(each) for each in survivals]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        joined: Floats = np.concatenate(survivals) if sizes else np.empty(0)
        if exponents is not None:
            joined = joined ** np.asarray(exponents, np.float64)[owners]
        order = np.argsort(-joined, kind="stable")  # equal ones stay parents first
        self._owners = owners[order]
        self._trees = len(sizes)
        self._gains: Floats = joined[order]
        self._attended: Floats = np.asarray(contexts, np.float64)[self._owners]

    def __len__(self) -> int:
        """Nodes of all trees."""
        return len(self._gains)

    def cut(self, step: Step, costs: StepCosts, *, causal: bool = False) -> int:
        """How many of the likeliest nodes to admit for most tokens per second.

        A pipelined engine has to know the size of a step before its trees are there. It takes the
        cut from the candidates of two steps before (DSpark 5.2) and admits as many of the new ones:
        then even the search over all cuts depends on no node that it decides on.

        Args:
            step: What else is in the step.
            costs: What steps cost.
            causal: Stop where the throughput first fails to rise, as Algorithm 1 does. Then no
                decision on a node depends on it or on what was drafted after it, which rejection
                sampling needs to stay exact (appendix A). Without it all cuts are compared: exact
                for the drafter-invariant contract only, and better where costs are jagged.
        """
        rates = self._rates(step, costs)
        if not causal:
            return int(rates.argmax())
        falls = np.flatnonzero(rates[1:] <= rates[:-1])
        return int(falls[0]) if len(falls) else len(rates) - 1

    def admit(self, count: int, step: Step, costs: StepCosts) -> Admission:
        """Admit the ``count`` likeliest."""
        count = min(count, len(self))
        tokens = np.array([step.tokens + count], np.float64)
        attended = np.array([step.attended + self._attended[:count].sum()])
        return Admission(
            np.bincount(self._owners[:count], minlength=self._trees).tolist(),
            step.emitted + float(self._gains[:count].sum()),
            float(costs.seconds(tokens, attended)[0]),
        )

    def _rates(self, step: Step, costs: StepCosts) -> Floats:
        """Expected tokens per second when the first 0, 1, 2, ... are admitted."""
        expected = _sums(step.emitted, self._gains)
        tokens = np.arange(step.tokens, step.tokens + len(self) + 1, dtype=np.float64)
        attended = _sums(step.attended, self._attended)
        rates: Floats = expected / (step.idle + costs.seconds(tokens, attended))
        return rates


def admit(
    survivals: Sequence[Floats],
    contexts: Sequence[int],
    step: Step,
    costs: StepCosts,
    *,
    exponents: Sequence[float] | None = None,
    causal: bool = False,
) -> Admission:
    """Choose the nodes of this step from the trees of this step.

    See :class:`Candidates` for the arguments, and :meth:`Candidates.cut` for ``causal``.
    """
    candidates = Candidates(survivals, contexts, exponents)
    return candidates.admit(candidates.cut(step, costs, causal=causal), step, costs)


def _sums(first: float, terms: Floats) -> Floats:
    """``first``, and after each term the sum so far."""
    sums: NDArray[Any] = np.empty(len(terms) + 1)
    sums[0] = first
    np.cumsum(terms, out=sums[1:])
    sums[1:] += first
    return sums
