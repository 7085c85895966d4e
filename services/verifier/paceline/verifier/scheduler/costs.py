"""What an engine step costs: a table over batch tokens, corrected as steps run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.decoder import Decoder, LocalCache
from paceline.device import SHAPES
from paceline.kernels import QueryBlock, plan_trees

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # batch tokens that are measured

_NEAR, _FAR = 32, 2048  # contexts that are measured; costs are linear in them. Unit: tokens
_ROWS = 4  # batch tokens a sequence
_SPLIT = 16  # tokens of the steps that are timed as so many sequences, and as one
_LONG_STEP = 0.15  # seconds after which a step is long enough for costs to be linear from there
_PROFILE_SECONDS = 2.5  # after these the steps are not measured once more
_KV_BYTES = 512 << 20  # all caches together: larger than processors' caches

_USUAL_RISE = 0.06

WEIGHT = 0.05  # weight of the newest step in running means

FIRST_STEPS = 16  # steps after which a running mean is known. Each counts as much as another one.

# A step that takes this many times longer than predicted was disturbed and is left out.
OUTLIER = 5.0

# Runs a step of batch tokens, tokens a sequence and context; the time it took in seconds.
Run = Callable[[int, int, int], float]


@dataclass(frozen=True)
class CostTable:
    """Times of steps by their batch tokens, and what contexts add to them. Raises ``ValueError`` if
    there are fewer than two points, they do not rise, or a time is not positive and finite."""

    tokens: tuple[int, ...]  # batch tokens of the points, rising
    seconds: tuple[float, ...]  # time of a step at each point, without the rest. Unit: seconds.
    per_sequence: float = 0.0  # time that each sequence in a step adds. Unit: seconds.
    # Time that each KV token of a sequence's context adds, which its batch tokens read together.
    # Unit: seconds.
    per_kv: float = 0.0
    # Time that each KV token adds for each batch token that attends to it. Unit: seconds.
    per_attended: float = 0.0

    def __post_init__(self) -> None:
        valid = (
            len(self.tokens) == len(self.seconds) >= 2
            and self.tokens[0] > 0
            and all(a < b for a, b in pairwise(self.tokens))
            and all(0 < time < float("inf") for time in self.seconds)
            and all(
                0 <= time < float("inf")
                for time in (self.per_sequence, self.per_kv, self.per_attended)
            )
        )
        if not valid:
            raise ValueError("expected at least 2 rising points and times above 0")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CostTable:
        """Inverse of ``dataclasses.asdict``, with JSON's lists for tuples."""
        points = {name: tuple(fields[name]) for name in ("tokens", "seconds")}
        return cls(**{**fields, **points})


class Costs:
    """A cost table, corrected as the engine runs.

    A profile runs steps in a row on an idle machine, with warm caches: in service they take longer,
    and not all of them by the same factor. One factor corrects all times, and each point of the
    table is corrected by the steps around it.
    """

    def __init__(self, profiled: CostTable) -> None:
        self.profiled = profiled  # the table as it was measured
        self.scale = 1.0  # the common factor
        self._steps = 0
        self._seconds = list(profiled.seconds)

    def plain_seconds(self, sequences: int, tokens: int, context: float) -> float:
        """Return the time of a step by the profile; see :meth:`seconds`."""
        return self.profiled_seconds(sequences, tokens, context)[0]

    def profiled_seconds(
        self, sequences: int, tokens: int, context: float, nodes: int = 0
    ) -> list[float]:
        """Return times of steps by the profile; see :meth:`seconds`."""
        return _seconds(self.profiled, self.profiled.seconds, sequences, tokens, context, nodes)

    def seconds(self, sequences: int, tokens: int, context: float, nodes: int = 0) -> list[float]:
        """Return times of a step with 0, 1, 2, ... nodes more than its batch tokens.

        ``context`` is the number of KV tokens that each batch token attends to, on average.
        """
        times = _seconds(self.profiled, self._seconds, sequences, tokens, context, nodes)
        return [self.scale * time for time in times]

    def observe(self, sequences: int, tokens: int, context: float, seconds: float) -> None:
        """Learn from a step that took ``seconds``; the other arguments are as above."""
        (predicted,) = self.seconds(sequences, tokens, context)
        ratio = seconds / predicted
        if self._steps >= FIRST_STEPS and not 1 / OUTLIER < ratio < OUTLIER:
            return  # something else kept the machine busy
        self._steps += 1
        self.scale *= 1 + max(WEIGHT, 1 / (1 + self._steps)) * (ratio - 1)
        if self._steps < FIRST_STEPS:
            return
        axis = self.profiled.tokens
        row = min(max(bisect_right(axis, tokens) - 1, 0), len(axis) - 2)
        place = min((tokens - axis[row]) / (axis[row + 1] - axis[row]), 1.0)
        missing = WEIGHT * (seconds - predicted) / self.scale
        for point, weight in ((row, 1 - place), (row + 1, place)):
            changed = self._seconds[point] + weight * missing
            self._seconds[point] = max(changed, self.profiled.seconds[point] / 10)

    def to_json(self) -> dict[str, Any]:
        return {"scale": self.scale, "seconds": self._seconds}

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Take over corrections of an earlier process, if they are for such a table."""
        scale, seconds = float(stored["scale"]), [float(time) for time in stored["seconds"]]
        fits = len(seconds) == len(self._seconds) and all(0 < time < 1e3 for time in seconds)
        if fits and 0.001 < scale < 1000:
            self.scale, self._seconds, self._steps = scale, seconds, FIRST_STEPS


def _seconds(
    grid: CostTable,
    seconds: Sequence[float],
    sequences: int,
    tokens: int,
    context: float,
    nodes: int,
) -> list[float]:
    """Return times of steps with ``tokens`` to ``tokens + nodes`` batch tokens, interpolated
    linearly. Beyond the last point they grow as between the last two, at most in proportion to the
    batch tokens."""
    last, end = grid.tokens[-1], seconds[-1]
    slope = (end - seconds[-2]) / (last - grid.tokens[-2])
    slope = max(0.0, min(slope, end / last))
    counts = np.arange(tokens, tokens + nodes + 1)
    times = np.interp(counts, grid.tokens, seconds) + slope * np.maximum(counts - last, 0)
    times += counts * (context * grid.per_attended)
    times += sequences * (grid.per_sequence + context * grid.per_kv)
    seconds_of: list[float] = times.tolist()
    return seconds_of


def flat_table() -> CostTable:
    """Return a table for devices whose steps are not profiled: all steps take as long.

    That is so on a GPU as long as a step reads more bytes of weights than it computes with. What is
    different shows as the engine runs: see :class:`Costs`. Each shape of a CUDA graph is a point.
    """
    tokens = tuple(sorted({*TOKENS, *SHAPES}))
    return CostTable(tokens, (0.01,) * len(tokens))


def rising_table() -> CostTable:
    """Return a table for processors whose steps cannot be profiled: each batch token after the
    first makes a step longer by a share that is usual for small models on a few cores."""
    return CostTable(TOKENS, tuple(0.01 * (1 + _USUAL_RISE * (tokens - 1)) for tokens in TOKENS))


def profile(decoder: Decoder, max_context: int, seconds: float = _PROFILE_SECONDS) -> CostTable:
    """Measure the table of a model for texts of at most ``max_context`` tokens: about three seconds
    for a small one, at most some dozen steps for one whose steps are long. After so many
    ``seconds`` they are not measured once more. Call it where the model's math threads are the ones
    that serve."""
    max_tokens = min(max_context, _KV_BYTES // decoder.config.kv_bytes_per_token)
    far = max(2 * _NEAR, min(_FAR, max_tokens))
    run = _runner(decoder, far)
    run(1, 1, _NEAR)  # the first step allocates memory and compiles programs
    axis = _points(run)
    steps = [(tokens, _ROWS, _NEAR) for tokens in axis]
    split = [(_SPLIT, rows, context) for context in (_NEAR, far) for rows in (1, _SPLIT)]
    *points, many, one, many_far, one_far = _min_seconds(run, [*steps, *split], seconds)
    extra, extra_far = (many - one) / (_SPLIT - 1), (many_far - one_far) / (_SPLIT - 1)
    per_kv = max(0.0, extra_far - extra) / (far - _NEAR)
    per_sequence = max(0.0, extra - _NEAR * per_kv)
    per_attended = max(0.0, (one_far - one) / (far - _NEAR) - per_kv) / _SPLIT
    times: list[float] = []
    for count, measured in reversed(list(zip(axis, points, strict=True))):
        added = -(-count // _ROWS) * (per_sequence + _NEAR * per_kv) + count * _NEAR * per_attended
        rest = max(measured - added, measured / 2)
        times.append(
            min([rest, *times[-1:]])
        )  # noise only adds time: no step is above a larger one
    return CostTable(axis, tuple(reversed(times)), per_sequence, per_kv, per_attended)


def _min_seconds(run: Run, steps: Sequence[tuple[int, int, int]], seconds: float) -> list[float]:
    """Return the minimum time of each of several steps.

    All are measured in turn, again and again: what disturbs the machine for a moment then hits
    another step each time. Each runs twice in a row, because in service too the weights are in the
    processor's caches from a step like it.
    """
    begun = perf_counter()
    times = [float("inf")] * len(steps)
    while True:
        times = [min(best, run(*step), run(*step)) for best, step in zip(times, steps, strict=True)]
        if perf_counter() - begun > seconds:
            return times


def _runner(decoder: Decoder, max_context: int) -> Run:
    """Return a function that times a step of sequences of ``rows`` tokens behind a context."""
    config = decoder.config
    slots = max_context + max(TOKENS)
    count = max(1, min(32, _KV_BYTES // (config.kv_bytes_per_token * slots)))
    caches = [LocalCache(config, decoder.device) for _ in range(count)]
    for cache in caches:
        cache.reserve(slots)
        for layer in range(config.kv_layers):
            for plane in cache.layer(layer):
                plane.fill_(0.1)

    def run(tokens: int, rows: int, context: int) -> float:
        begun = perf_counter()
        starts = range(0, tokens, rows)
        blocks = [
            QueryBlock(index % count, context, None, min(rows, tokens - start))
            for index, start in enumerate(starts)
        ]
        plan = plan_trees(blocks, device=decoder.device)
        for cache in caches:
            if cache.states is not None:
                cache.states.assume(context)
        zeros = torch.zeros(plan.rows, dtype=torch.int64, device=decoder.device)
        decoder.forward(zeros, plan, caches, logit_rows=None).logits.cpu()
        return perf_counter() - begun

    return run


def _points(run: Run) -> tuple[int, ...]:
    """Return the points to measure: up to the first long step, at least two."""
    for index, tokens in enumerate(TOKENS):
        if index and min(run(tokens, _ROWS, _NEAR) for _ in range(2)) > _LONG_STEP:
            return TOKENS[: index + 1]
    return TOKENS
