"""What an engine step costs: a table over batch tokens and attended KV tokens."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from typing import Any

_COMMON, _POINT = 0.02, 0.1  # weights of the newest step in the two corrections
_FIRST_STEPS = 16  # steps that set the scale; a table that was not profiled has none
_OUTLIER = 5.0  # a step this many times off its prediction was disturbed and is left out


@dataclass(frozen=True)
class CostTable:
    """Step times on a grid, interpolated linearly. Beyond the last row they grow at most in
    proportion to the batch tokens.

    Attributes:
        tokens: Batch tokens of the rows, rising.
        contexts: KV tokens that each batch token attends to, of the columns, rising.
        table: Time of a step, ``[len(tokens), len(contexts)]``. Unit: seconds.
        per_sequence: Time that each sequence in a step adds to it. Unit: seconds.
        per_kv: Time that it adds for each KV token of its context, which its batch tokens read
            together. Unit: seconds.

    Raises:
        ValueError: An axis is too short or does not rise, or a time is not positive and finite.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    per_sequence: float = 0.0
    per_kv: float = 0.0

    def __post_init__(self) -> None:
        valid = (
            min(len(self.tokens), len(self.contexts)) >= 2
            and len(self.table) == len(self.tokens)
            and all(len(row) == len(self.contexts) for row in self.table)
            and all(a < b for axis in (self.tokens, self.contexts) for a, b in pairwise(axis))
            and all(0 < seconds < float("inf") for row in self.table for seconds in row)
            and all(0 <= each < float("inf") for each in (self.per_sequence, self.per_kv))
        )
        if not valid:
            raise ValueError("expected rising axes of at least 2 points and times above 0")

    def step_seconds(self, sequences: int, tokens: int, attended: float) -> float:
        """Time of one step with ``attended`` KV tokens, summed over its batch tokens."""
        context = attended / tokens
        return next(growth(self, self.table, tokens, context)) + self.sequence_seconds(
            sequences, context
        )

    def sequence_seconds(self, sequences: int, context: float) -> float:
        """Time that sequences of such contexts add to a step, whatever their trees."""
        return sequences * (self.per_sequence + self.per_kv * context)

    def to_json(self) -> str:
        """The table as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """The table of :meth:`to_json`.

        Raises:
            ValueError: The text does not hold a valid table.
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


def growth(
    grid: CostTable, table: Sequence[Sequence[float]], tokens: int, context: float
) -> Iterator[float]:
    """Times of steps with ``tokens``, ``tokens`` + 1, ... batch tokens, without end.

    The sequences' own part is left out.

    Args:
        grid: The axes.
        table: Times at the points of the grid. Unit: seconds.
        tokens: At least 1.
        context: KV tokens that each batch token attends to, on average.
    """
    axis = grid.tokens
    row, _ = _cell(axis, tokens)
    column, across = _cell(grid.contexts, context)
    across = max(0.0, across)
    while True:
        low, high = axis[row], axis[row + 1]
        first, last = (_between(line, column, across) for line in table[row : row + 2])
        slope = (last - first) / (high - low)
        if tokens >= high:  # beyond the last row
            break
        for number in range(tokens, high):
            yield first + max(0, number - low) * slope
        tokens, row = max(tokens, high), min(row + 1, len(axis) - 2)
    for number in count(tokens):
        yield min(last * number / high, last + (number - high) * max(slope, 0.0))


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The interval of an axis that holds a value, or the nearest one, and the place in it."""
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])


def _between(line: Sequence[float], column: int, across: float) -> float:
    """A row's time at a place in a cell, or beyond the last column, where it does not fall."""
    first, second = line[column : column + 2]
    return first + across * (second - first if across <= 1 else max(0.0, second - first))


class LiveCosts:
    """A cost table, corrected as the engine runs.

    A profile runs steps in a row on an idle machine, with warm caches: in service they take longer,
    and not all of them by the same factor. One common factor corrects the whole table, and one per
    point the steps around it.

    Attributes:
        profiled: The table as it was measured.
        common: The common factor.
    """

    def __init__(self, profiled: CostTable) -> None:
        self.profiled = profiled
        self.common = 1.0
        self._steps = 0
        self._factors = [[1.0] * len(row) for row in profiled.table]
        self._table = [list(row) for row in profiled.table]
        """The profiled table with the factors of its points."""

    def growth(self, tokens: int, context: float) -> Iterator[float]:
        """Times of steps with ``tokens``, ``tokens`` + 1, ... batch tokens: see :func:`growth`."""
        times = growth(self.profiled, self._table, tokens, context)
        return (seconds * self.common for seconds in times)

    def sequence_seconds(self, sequences: int, context: float) -> float:
        """As :meth:`CostTable.sequence_seconds`, corrected."""
        return self.profiled.sequence_seconds(sequences, context) * self.common

    def observe(self, sequences: int, tokens: int, attended: float, seconds: float) -> None:
        """Learn from a step.

        Args:
            sequences: Sequences in it.
            tokens: Batch tokens in it.
            attended: KV tokens that they attend to, summed over them.
            seconds: Time it took.
        """
        context = attended / tokens
        predicted = next(self.growth(tokens, context)) + self.sequence_seconds(sequences, context)
        ratio = seconds / predicted
        if self._steps >= _FIRST_STEPS and not 1 / _OUTLIER < ratio < _OUTLIER:
            return  # something else kept the machine busy
        self._steps += 1
        self.common *= 1 + max(_COMMON, 1 / (1 + self._steps)) * (ratio - 1)
        if self._steps < _FIRST_STEPS:
            return
        grid = self.profiled
        (row, down), (column, across) = _cell(grid.tokens, tokens), _cell(grid.contexts, context)
        down, across = (min(max(each, 0.0), 1.0) for each in (down, across))
        for line, vertical in ((row, 1 - down), (row + 1, down)):
            for point, horizontal in ((column, 1 - across), (column + 1, across)):
                factor = 1 + _POINT * vertical * horizontal * (ratio - 1)
                self._factors[line][point] *= factor
                self._table[line][point] *= factor

    def to_json(self) -> dict[str, Any]:
        """The corrections."""
        return {"common": self.common, "points": self._factors}

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Take over corrections of an earlier process, if they are for such a table."""
        common = float(stored["common"])
        factors = [[float(each) for each in row] for row in stored["points"]]
        fits = [len(row) for row in factors] == [len(row) for row in self._factors]
        if fits and 0.001 < common < 1000 and all(0.01 < f < 100 for row in factors for f in row):
            self.common, self._factors, self._steps = common, factors, _FIRST_STEPS
            self._table = [
                [seconds * factor for seconds, factor in zip(*rows, strict=True)]
                for rows in zip(self.profiled.table, factors, strict=True)
            ]
