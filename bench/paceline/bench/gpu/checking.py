"""What the checks have in common."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def arguments() -> tuple[torch.device, int]:
    """Device and seed from the command line; everything random is seeded."""
    device, seed = torch.device(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(seed)
    return device, seed


def part() -> str:
    """What of the check is to be run, from the command line; empty: all of it."""
    return sys.argv[3] if len(sys.argv) > 3 else ""


def report(name: str, value: Any) -> None:
    """Tell a result at once: a check that fails later has told it."""
    print(json.dumps({name: value}), flush=True)


def require(holds: bool, message: str) -> None:
    """Fail the check, at its end, unless something holds."""
    if not holds:
        _BROKEN.append(message)
        print(message, file=sys.stderr, flush=True)


def broken() -> bool:
    """Whether anything did not hold so far."""
    return bool(_BROKEN)


def finish() -> None:
    """Leave with status 1 if anything did not hold."""
    sys.exit(1 if _BROKEN else 0)


_BROKEN: list[str] = []


def median_ms(action: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of an action on an idle device, caches of the GPU flushed in between.

    Unit: milliseconds.
    """
    for _ in range(3):
        action()
    times = []
    if device.type != "cuda":
        for _ in range(3):
            began = time.perf_counter()
            action()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def graphed(action: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same as one replay of a CUDA graph, so that the CPU's part is not what is timed."""
    if device.type != "cuda":
        return action
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()
        action()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay
