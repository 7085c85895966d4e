"""What an engine step costs, as a table over batch tokens and attended KV tokens."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paceline.verifier.scheduler.admission import Floats

_COMMON, _POINT = 0.02, 0.1  # weights of the newest step in the two corrections
_FIRST_STEPS = 16  # steps that set the scale; a table that was not profiled has none
_OUTLIER = 5.0  # a step this many times off its prediction was disturbed and is left out


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

    def seconds(self, tokens: Floats, attended: Floats, factors: Floats | None = None) -> Floats:
        """Time of steps, the sequences' own part left out: it is the same for every cut.

        Args:
            tokens: Batch tokens of each step, ``[n]``, at least 1.
            attended: KV tokens that they attend to, summed over them, ``[n]``.
            factors: Corrections of the grid's points, ``[len(self.tokens), len(self.contexts)]``.

        Returns:
            Seconds, ``[n]``.
        """
        row, down = _place(self._tokens, tokens)
        column, across = _place(self._contexts, attended / tokens)
        # Beyond the last row the line goes on, in proportion at most, whatever its noise says.
        excess = np.maximum(tokens / self.tokens[-1], 1.0)
        beyond, down = np.maximum(down, 1.0), np.minimum(down, 1.0)
        grid, width = self._flat, len(self.contexts)
        if factors is not None:
            grid = grid * factors.ravel()
        at = row * width + column
        upper = grid[at] + across * (grid[at + 1] - grid[at])
        at += width
        lower = grid[at] + across * (grid[at + 1] - grid[at])
        inside = np.maximum(upper + down * (lower - upper), grid.min())
        seconds: Floats = np.minimum(
            inside * excess, inside + (beyond - 1.0) * np.maximum(lower - upper, 0.0)
        )
        return seconds

    def step_seconds(
        self, sequences: int, tokens: int, attended: float, factors: Floats | None = None
    ) -> float:
        """Time of one step. The same as :meth:`seconds` without arrays: it runs once a step."""
        row, down = _place_one(self.tokens, tokens)
        column, across = _place_one(self.contexts, attended / tokens)
        (a, b), (c, d) = (line[column : column + 2] for line in self.table[row : row + 2])
        lowest = self._least
        if factors is not None:
            (e, f), (g, h) = factors[row : row + 2, column : column + 2].tolist()
            a, b, c, d = a * e, b * f, c * g, d * h
            lowest = float((self._flat * factors.ravel()).min())
        upper, lower = a + across * (b - a), c + across * (d - c)
        inside = max(upper + min(down, 1.0) * (lower - upper), lowest)
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
        return json.dumps(asdict(self))

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


class LiveCosts:
    """A cost table, corrected as the engine runs.

    A profile runs steps in a row on an idle machine, with warm caches: in service they take longer,
    and not all of them by the same factor. One common factor corrects the whole table, and one each
    the points around the steps that run.
    """

    def __init__(self, profiled: CostTable) -> None:
        self.profiled = profiled
        self.common = 1.0
        self._steps = 0
        self.points = np.ones((len(profiled.tokens), len(profiled.contexts)))

    def seconds(self, tokens: Floats, attended: Floats) -> Floats:
        """As :meth:`CostTable.seconds`, corrected."""
        return self.profiled.seconds(tokens, attended, self.points) * self.common

    def sequence_seconds(self, sequences: int, context: float) -> float:
        """As :meth:`CostTable.sequence_seconds`, corrected."""
        return self.profiled.sequence_seconds(sequences, context) * self.common

    def observe(self, sequences: int, tokens: int, attended: float, seconds: float) -> None:
        """A step took so long.

        Args:
            sequences: Sequences in it.
            tokens: Batch tokens in it.
            attended: KV tokens that they attend to, summed over them.
            seconds: Time it took.
        """
        table = self.profiled
        predicted = table.step_seconds(sequences, tokens, attended, self.points)
        ratio = seconds / (predicted * self.common)
        if self._steps >= _FIRST_STEPS and not 1 / _OUTLIER < ratio < _OUTLIER:
            return  # something else kept the machine busy
        self._steps += 1
        self.common *= 1 + max(_COMMON, 1 / (1 + self._steps)) * (ratio - 1)
        if self._steps < _FIRST_STEPS:
            return
        row, down = _place_one(table.tokens, tokens)
        column, across = _place_one(table.contexts, attended / tokens)
        down, across = (min(max(each, 0.0), 1.0) for each in (down, across))
        for line, weight in ((row, 1 - down), (row + 1, down)):
            change = _POINT * weight * (ratio - 1)
            self.points[line, column] *= 1 + change * (1 - across)
            self.points[line, column + 1] *= 1 + change * across

    def to_json(self) -> dict[str, Any]:
        """The corrections."""
        return {"common": self.common, "points": self.points.tolist()}

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Take over corrections of an earlier process, if they are for such a table."""
        points = np.asarray(stored["points"], np.float64)
        fits = points.shape == self.points.shape and np.all((points > 0.01) & (points < 100))
        if fits and 0.001 < float(stored["common"]) < 1000:
            self.common, self.points = float(stored["common"]), points
            self._steps = _FIRST_STEPS


def _place(axis: Floats, values: Floats) -> tuple[Any, Floats]:
    """The grid's cell of each value, the nearest one for those outside, and the place in it."""
    cell = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    low = axis[cell]
    return cell, (values - low) / (axis[cell + 1] - low)


def _place_one(axis: tuple[int, ...], value: float) -> tuple[int, float]:
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])
