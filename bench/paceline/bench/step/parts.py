"""Where the time of a decoder step goes: five parts, by rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from paceline.bench.step.engines import PacelineEngine
from paceline.kernels.program import Kind

# The parts. What prepares a product belongs to the stage of the operation before it; the choice of
# tokens is argmax here; the host makes plans, arguments and tensors.
PARTS = ("linear layers", "attention", "head and choice", "norms, RoPE, gates", "host")
_ATTENTION = {Kind.ATTEND, Kind.ATTEND_CONTEXT, Kind.DELTA}
_STEPS = 40


def profile(engine: PacelineEngine, context: int, rows: Sequence[int]) -> dict[str, list[float]]:
    """Return the medians of the parts of a step in milliseconds, in the order of `PARTS`, by
    ``ms_ROWS``. Raises ``ValueError`` if there are no compiled kernels for the model."""
    native = engine.decoder.native
    if native is None:
        raise ValueError(f"{engine.name}: a profile needs compiled kernels for the model")
    cache, program = engine.synthetic_cache(context), native.program
    medians: dict[str, list[float]] = {}
    try:
        for count in rows:
            times: list[list[float]] = []
            for _ in range(_STEPS + 1):
                native.nanoseconds = torch.zeros(len(program.operations), dtype=torch.int64)
                began = time.perf_counter()
                choice = engine.step(cache, count)
                whole = 1e3 * (time.perf_counter() - began)
                parts: dict[str, float] = defaultdict(float, {"head and choice": 1e3 * choice})
                measured = (native.nanoseconds.double() / 1e6).tolist()
                for at, (op, ms) in enumerate(zip(program.operations, measured, strict=True)):
                    parts[_part(op.kind, at >= program.selecting)] += ms
                parts["host"] = whole - sum(parts.values())
                times.append([parts[name] for name in PARTS])
            steps = torch.tensor(times[1:])
            medians[f"ms_{count}"] = steps.median(dim=0).values.tolist()
    finally:
        native.nanoseconds = None
    return medians


def _part(kind: Kind, selected: bool) -> str:
    if selected:
        return "head and choice"
    if kind == Kind.MULTIPLY:
        return "linear layers"
    return "attention" if kind in _ATTENTION else "norms, RoPE, gates"
