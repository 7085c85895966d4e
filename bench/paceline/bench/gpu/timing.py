"""Times of single actions on a device, and the output of a measurement."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def arguments() -> torch.device:
    """The device of the command line; seeds torch with the second argument."""
    torch.manual_seed(int(sys.argv[2]))
    return torch.device(sys.argv[1])


def report(name: str, value: Any) -> None:
    """Print a result as a line of JSON, at once: it stays if a later measurement fails."""
    print(json.dumps({name: value}), flush=True)


def median_ms(action: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median milliseconds of an action on an idle device; on a GPU with cold caches."""
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
    """The action as a replay of a CUDA graph, so that launches by the CPU are not timed."""
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


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written by a large copy. Unit: GB/s."""
    size = 1 << (32 if device.type == "cuda" else 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * size / median_ms(lambda: goal.copy_(source), device, repeats=10) / 1e6
