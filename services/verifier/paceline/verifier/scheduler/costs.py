"""What an engine step costs: a table over batch tokens and attended KV tokens."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
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

    def growth(self, tokens: int, context: float) -> Iterator[float]:
        """Times of steps with ``tokens``, ``tokens`` + 1, ... batch tokens, without end.

        The sequences' own part is left out.

        Args:
            tokens: At least 1.
            context: KV tokens that each batch token attends to, on average.
        """
        axis = self.tokens
        column, across = self._column(context)
        row = min(max(bisect_right(axis, tokens) - 1, 0), len(axis) - 2)
        while True:
            low, high = axis[row], axis[row + 1]
            first, last = (_between(line, column, across) for line in self.table[row : row + 2])
            slope = (last - first) / (high - low)
            if row == len(axis) - 2 and tokens >= high:
                break
            for number in range(tokens, high):
                yield first + max(0, number - low) * slope
            tokens, row = max(tokens, high), min(row + 1, len(axis) - 2)
        for number in count(tokens):
            yield min(last * number / high, last + (number - high) * max(slope, 0.0))

    def step_seconds(self, sequences: int, tokens: int, attended: float) -> float:
        """Time of one step with ``attended`` KV tokens, summed over its batch tokens."""
        context = attended / tokens
        return next(self.growth(tokens, context)) + self.sequence_seconds(sequences, context)

    def sequence_seconds(self, sequences: int, context: float) -> float:
        """Time that sequences of such contexts add to a step, whatever their trees."""
        return sequences * (self.per_sequence + self.per_kv * context)

    def point(self, tokens: int, context: float) -> tuple[int, float, int, float]:
        """The cell of the grid that a step lies in, or the nearest one, and its place in [0, 1]:
        row, part of the way to the next row, column, and part of the way to the next column."""
        axis = self.tokens
        row = min(max(bisect_right(axis, tokens) - 1, 0), len(axis) - 2)
        down = (tokens - axis[row]) / (axis[row + 1] - axis[row])
        column, across = self._column(context)
        return row, min(max(down, 0.0), 1.0), column, min(across, 1.0)

    def _column(self, context: float) -> tuple[int, float]:
        axis = self.contexts
        column = min(max(bisect_right(axis, context) - 1, 0), len(axis) - 2)
        return column, max(0.0, (context - axis[column]) / (axis[column + 1] - axis[column]))

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


def _between(line: tuple[float, ...], column: int, across: float) -> float:
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
        current: The corrected table.
        common: The common factor.
    """

    def __init__(self, profiled: CostTable) -> None:
        self.profiled = self.current = profiled
        self.common = 1.0
        self._steps = 0
        self._points = [[1.0] * len(profiled.contexts) for _ in profiled.tokens]

    def observe(self, sequences: int, tokens: int, attended: float, seconds: float) -> None:
        """Learn from a step.

        Args:
            sequences: Sequences in it.
            tokens: Batch tokens in it.
            attended: KV tokens that they attend to, summed over them.
            seconds: Time it took.
        """
        ratio = seconds / self.current.step_seconds(sequences, tokens, attended)
        if self._steps >= _FIRST_STEPS and not 1 / _OUTLIER < ratio < _OUTLIER:
            return  # something else kept the machine busy
        self._steps += 1
        self.common *= 1 + max(_COMMON, 1 / (1 + self._steps)) * (ratio - 1)
        if self._steps >= _FIRST_STEPS:
            row, down, column, across = self.profiled.point(tokens, attended / tokens)
            for line, weight in ((row, 1 - down), (row + 1, down)):
                change = _POINT * weight * (ratio - 1)
                self._points[line][column] *= 1 + change * (1 - across)
                self._points[line][column + 1] *= 1 + change * across
        self._correct()

    def to_json(self) -> dict[str, Any]:
        """The corrections."""
        return {"common": self.common, "points": self._points}

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Take over corrections of an earlier process, if they are for such a table."""
        common = float(stored["common"])
        points = [[float(each) for each in row] for row in stored["points"]]
        fits = [len(row) for row in points] == [len(row) for row in self._points]
        if fits and 0.001 < common < 1000 and all(0.01 < p < 100 for row in points for p in row):
            self.common, self._points, self._steps = common, points, _FIRST_STEPS
            self._correct()

    def _correct(self) -> None:
        common = self.common
        table = tuple(
            tuple(seconds * factor * common for seconds, factor in zip(row, factors, strict=True))
            for row, factors in zip(self.profiled.table, self._points, strict=True)
        )
        self.current = replace(
            self.profiled,
            table=table,
            per_sequence=self.profiled.per_sequence * common,
            per_kv=self.profiled.per_kv * common,
        )
