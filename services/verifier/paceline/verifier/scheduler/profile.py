"""Measuring what steps cost on this machine, once for each model."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.decoder import Decoder, LocalCache
from paceline.kernels import TreeSegment, plan_trees
from paceline.verifier.scheduler.costs import CostTable

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
"""Batch tokens that are measured."""

CONTEXTS = (32, 512, 2048, 8192, 32768)
"""Contexts that are measured, up to the model's. Unit: tokens."""

_ROWS = 4  # batch tokens a sequence
_SPLIT = 16  # tokens of the steps that are timed as so many sequences, and as one
_AGAIN, _SHORT = 3, 0.012  # times that a step is run in a row, and seconds that make one too long
_LONG_STEP = 0.15  # seconds after which a step is long enough for costs to be linear from there
_BUDGET = 2.5  # seconds after which the grid is not measured once more
_NOMINAL = 0.01  # seconds of every step of a table that is not measured
_MIN_SWEEPS, _MAX_SWEEPS = 2, 8  # times that the grid is measured
_KV_BYTES = 512 << 20  # all caches together: larger than those of processors


class Profiler:
    """Runs steps of chosen shapes on caches of its own."""

    def __init__(self, decoder: Decoder, longest: int) -> None:
        """Make caches for contexts up to ``longest`` tokens."""
        self._decoder = decoder
        config = decoder.config
        slots = longest + max(TOKENS)
        self._caches = [
            LocalCache(config, decoder.device)
            for _ in range(max(1, min(32, _KV_BYTES // (config.kv_bytes_per_token * slots))))
        ]
        for cache in self._caches:
            cache.reserve(slots)
            for layer in range(config.layers):
                for plane in cache.layer(layer):
                    plane.fill_(0.1)

    def step(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Time of one step of blocks of ``(tokens, context)`` each."""
        begun = perf_counter()
        caches = self._caches
        plan = plan_trees(
            [
                TreeSegment(index % len(caches), context, None, tokens)
                for index, (tokens, context) in enumerate(shapes)
            ],
            device=self._decoder.device,
        )
        tokens = torch.zeros(plan.rows, dtype=torch.int64, device=self._decoder.device)
        self._decoder.forward(tokens, plan, caches, logit_rows=None).logits.cpu()
        return perf_counter() - begun


def shapes_of(tokens: int, context: int, rows: int = _ROWS) -> list[tuple[int, int]]:
    """Blocks of at most ``rows`` tokens that make a step of so many, all behind one context."""
    whole, rest = divmod(tokens, rows)
    return [(rows, context)] * whole + [(rest, context)] * (rest > 0)


def profile(decoder: Decoder, max_context: int) -> CostTable:
    """Measure the table of a model: about three seconds for a small one, at most some dozen steps
    for one whose steps are long.

    Call it where the model's math threads are the ones that serve.

    Args:
        decoder: The model.
        max_context: Longest text that will be served. Unit: tokens.
    """
    contexts = contexts_of(min(max_context, _KV_BYTES // decoder.config.kv_bytes_per_token))
    profiler = Profiler(decoder, contexts[-1])
    grid = [
        [shapes_of(tokens, context) for context in contexts]
        for tokens in _worth_measuring(profiler, contexts[0])
    ]
    near, far = contexts[:2]
    split = [shapes_of(_SPLIT, context, rows) for context in (near, far) for rows in (1, _SPLIT)]
    *points, many, one, many_far, one_far = min_seconds(
        profiler, [*(step for row in grid for step in row), *split]
    )
    at_near, at_far = (max(0.0, each) / (_SPLIT - 1) for each in (many - one, many_far - one_far))
    per_kv = max(0.0, at_far - at_near) / (far - near)
    per_sequence = max(0.0, at_near - per_kv * near)
    table = np.array(points).reshape(len(grid), len(contexts))
    # What the table holds is without the sequences' own part.
    own = np.outer(
        [len(row[0]) for row in grid], per_sequence + per_kv * np.array(contexts, np.float64)
    )
    return CostTable(
        TOKENS[: len(grid)],
        contexts,
        _rising(np.maximum(table - own, table / 2)),
        per_sequence,
        per_kv,
    )


def flat_table(max_context: int) -> CostTable:
    """A table for devices whose steps are not profiled: all steps take as long.

    That is so on a GPU as long as a step reads more bytes of weights than it computes with. What is
    different shows as the engine runs: see ``LiveCosts``.
    """
    contexts = contexts_of(max_context)
    return CostTable(TOKENS, contexts, ((_NOMINAL,) * len(contexts),) * len(TOKENS))


def contexts_of(max_context: int) -> tuple[int, ...]:
    """Contexts to measure for texts of at most so many tokens: at least two."""
    shortest = min(CONTEXTS[0], max(1, max_context - 1))
    contexts = sorted({shortest, *(each for each in CONTEXTS if shortest < each < max_context)})
    return tuple(contexts) if len(contexts) > 1 else (shortest, max(shortest + 1, max_context))


def min_seconds(profiler: Profiler, steps: Sequence[list[tuple[int, int]]]) -> list[float]:
    """Minimum time of each of several steps.

    All are measured in turn, again and again: what disturbs the machine for a moment then hits
    another step each time. Short ones are run several times in a row, because in service too the
    weights are in the processor's caches from a step like it.

    Args:
        profiler: Runs them.
        steps: Blocks of each.
    """
    begun = perf_counter()
    times = [float("inf")] * len(steps)
    for sweep in range(_MAX_SWEEPS):
        if sweep >= _MIN_SWEEPS and perf_counter() - begun > _BUDGET:
            break
        for index, step in enumerate(steps):
            for _ in range(_AGAIN):
                times[index] = min(times[index], profiler.step(step))
                if times[index] > _SHORT:
                    break
    return times


def _worth_measuring(profiler: Profiler, context: int) -> tuple[int, ...]:
    """The rows of the grid up to the first long step, at least two."""
    profiler.step([(1, context)])  # the first step of all makes what others find made
    for index, tokens in enumerate(TOKENS):
        shapes = shapes_of(tokens, context)
        if index and min(profiler.step(shapes), profiler.step(shapes)) > _LONG_STEP:
            return TOKENS[: index + 1]
    return TOKENS


def _rising(table: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    """No step takes longer than a larger one: what disturbed a measurement made it too long."""
    for axis in (0, 1):
        table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
    return tuple(tuple(row) for row in table.tolist())
