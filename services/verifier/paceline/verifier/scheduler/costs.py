"""What an engine step costs, as a table over batch tokens and attended KV tokens."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paceline.verifier.scheduler.admission import Floats


@dataclass(frozen=True)
class CostTable:
    """Step times on a grid, with straight lines between its points and beyond them; beyond the last
    row they grow in proportion to tokens at most.

    Real costs are jagged: a step may take no longer for one token more, then much longer for the
    next. The grid keeps what jags its points show.

    Attributes:
        tokens: Batch tokens of the grid's rows, rising. Unit: tokens.
        contexts: KV tokens that each batch token attends to, of the grid's columns, rising.
        table: Time of a step, ``[len(tokens), len(contexts)]``. Unit: seconds.
        per_sequence: Time that each sequence in a step adds to it. Unit: seconds.
        per_kv: And that it adds for each KV token of its context, which its tokens read together.
            Unit: seconds.

    Raises:
        ValueError: It is no such table.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    per_sequence: float = 0.0
    per_kv: float = 0.0

    def __post_init__(self) -> None:
        grid = np.asarray(self.table, np.float64)
        fine = (
            min(len(self.tokens), len(self.contexts)) >= 2
            and grid.shape == (len(self.tokens), len(self.contexts))
            and all(np.all(np.diff(axis) > 0) for axis in (self.tokens, self.contexts))
            and np.all(np.isfinite(grid))
            and np.all(grid > 0)
            and 0 <= self.per_sequence < float("inf")
            and 0 <= self.per_kv < float("inf")
        )
        if not fine:
            raise ValueError("expected rising axes of at least 2 points and times above 0")

    def seconds(self, tokens: Floats, attended: Floats) -> Floats:
        """Time of steps, the sequences' own part left out: it is the same for every cut.

        Args:
            tokens: Batch tokens of each step, ``[n]``, at least 1.
            attended: KV tokens that they attend to, summed over them, ``[n]``.

        Returns:
            Seconds, ``[n]``.
        """
        row, down = _place(self._tokens, tokens)
        column, across = _place(self._contexts, attended / tokens)
        # Beyond the last row the line goes on, in proportion at most, whatever its noise says.
        excess = np.maximum(tokens / self.tokens[-1], 1.0)
        beyond, down = np.maximum(down, 1.0), np.minimum(down, 1.0)
        grid, width = self._flat, len(self.contexts)
        at = row * width + column
        upper = grid[at] + across * (grid[at + 1] - grid[at])
        at += width
        lower = grid[at] + across * (grid[at + 1] - grid[at])
        inside = np.maximum(upper + down * (lower - upper), self._least)
        seconds: Floats = np.minimum(
            inside * excess, inside + (beyond - 1.0) * np.maximum(lower - upper, 0.0)
        )
        return seconds

    def step_seconds(self, sequences: int, tokens: int, attended: int) -> float:
        """Time of one step, as :meth:`seconds` has it: without arrays, for each step asks."""
        row, down = _place_one(self.tokens, tokens)
        column, across = _place_one(self.contexts, attended / tokens)
        first, second = self.table[row], self.table[row + 1]
        upper = first[column] + across * (first[column + 1] - first[column])
        lower = second[column] + across * (second[column + 1] - second[column])
        inside = max(upper + min(down, 1.0) * (lower - upper), self._least)
        forward = min(
            inside * max(tokens / self.tokens[-1], 1.0),
            inside + max(down - 1.0, 0.0) * max(lower - upper, 0.0),
        )
        return forward + self.sequence_seconds(sequences, attended / tokens)

    def sequence_seconds(self, sequences: int, context: float) -> float:
        """Time that sequences of such contexts add to a step, whatever their trees."""
        return sequences * (self.per_sequence + self.per_kv * context)

    def to_json(self) -> str:
        """As stored."""
        return json.dumps(
            {
                "tokens": self.tokens,
                "contexts": self.contexts,
                "table": self.table,
                "per_sequence": self.per_sequence,
                "per_kv": self.per_kv,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """As read.

        Raises:
            ValueError: It is none.
        """
        fields: Mapping[str, Any] = json.loads(text)
        try:
            return cls(
                tuple(int(each) for each in fields["tokens"]),
                tuple(int(each) for each in fields["contexts"]),
                tuple(tuple(float(each) for each in row) for row in fields["table"]),
                float(fields["per_sequence"]),
                float(fields["per_kv"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost table: {error!r}") from error

    @cached_property
    def _tokens(self) -> Floats:
        return np.asarray(self.tokens, np.float64)

    @cached_property
    def _contexts(self) -> Floats:
        return np.asarray(self.contexts, np.float64)

    @cached_property
    def _flat(self) -> Floats:
        return np.asarray(self.table, np.float64).ravel()

    @cached_property
    def _least(self) -> float:
        return float(self._flat.min())


def _place(axis: Floats, values: Floats) -> tuple[Any, Floats]:
    """The grid's cell of each value, the nearest one for those outside, and the place in it."""
    cell = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    low = axis[cell]
    return cell, (values - low) / (axis[cell + 1] - low)


def _place_one(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])
