"""How well the verifier's cost table foretells steps it was not measured on, and its decisions."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.decoder import Decoder
from paceline.verifier.scheduler.admission import Step, admit
from paceline.verifier.scheduler.profile import Profiler, least_seconds, profile, shapes_of

HELD_OUT = (
    *((1, 300, 1), (5, 300, 5), (7, 1000, 7), (10, 700, 1), (10, 200, 5), (20, 300, 1)),
    *((20, 900, 4), (20, 1500, 10), (40, 300, 1), (40, 300, 8), (40, 1200, 5), (56, 150, 7)),
    *((80, 300, 5), (80, 800, 10), (112, 200, 4), (160, 400, 5), (224, 300, 7), (320, 200, 10)),
)
"""Shapes between the table's points: batch tokens, context, and tokens a sequence."""

_SWEEPS = 12  # what is compared with the table ought to be surer than the table

SEQUENCES, NODES = 64, 16
"""Of the decision that is timed."""


def measure(target: Path, dtype: str) -> dict[str, Any]:
    """Profile a model as a verifier does at start, then time other steps."""
    decoder = Decoder.load(target, dtype)
    begun = time.perf_counter()
    with torch.inference_mode():
        table = profile(decoder, decoder.config.max_position)
        profiled = time.perf_counter() - begun
        profiler = Profiler(decoder, max(context for _, context, _ in HELD_OUT))
        rows = []
        steps = [shapes_of(tokens, context, each) for tokens, context, each in HELD_OUT]
        measured = least_seconds(profiler, steps, sweeps=(_SWEEPS, _SWEEPS))
        for (tokens, context, each), shapes, took in zip(HELD_OUT, steps, measured, strict=True):
            foretold = table.step_seconds(len(shapes), tokens, tokens * context)
            rows.append(
                {
                    "tokens": tokens,
                    "context": context,
                    "tokens_per_sequence": each,
                    "foretold_ms": foretold * 1e3,
                    "measured_ms": took * 1e3,
                    "error": abs(foretold / took - 1),
                }
            )
    errors = [row["error"] for row in rows]
    survivals = np.random.default_rng(0).uniform(0.5, 1.0, (SEQUENCES, NODES)).cumprod(1)
    step = Step(SEQUENCES, SEQUENCES * 500, SEQUENCES)
    times = []
    for _ in range(300):
        begun = time.perf_counter()
        admit(list(survivals), [500] * SEQUENCES, step, table, exponents=[1.1] * SEQUENCES)
        times.append((time.perf_counter() - begun) * 1e3)
    return {
        "profile_seconds": profiled,
        "mean_error": statistics.fmean(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "shapes": rows,
        "decision": {
            "sequences": SEQUENCES,
            "nodes": NODES,
            "median_ms": statistics.median(times),
            "p99_ms": float(np.percentile(times, 99)),
        },
    }
