"""Seconds until both services of the demo are ready, with no kernel compiled and with all.

    python -m paceline.bench.gpu.start cuda 0      # reports lines of JSON

Fails if a start on a GPU misses one of :data:`TARGETS`.
"""

from __future__ import annotations

import tempfile
import time

from paceline.bench.gpu.cases import Targets, arguments, fail_if_missed, missed_targets, report
from paceline.bench.gpu.texts import DEMO
from paceline.harness import ServiceProcess

COLD = "seconds_to_start_cold"

TARGETS: Targets = {(COLD, "both"): 20.0}
"""Longest start with no kernel compiled, on an H100. Unit: seconds."""

DRAFTERS = ("longspec", "dspark")


def start(device: str, kernels: str) -> dict[str, float]:
    """Seconds of the verifier's start, of the drafter's behind it, and of both; ``kernels`` is the
    folder of compiled kernels, those of the CPU too."""
    target, on = DEMO / "target", f"--device={device}"
    load = [f"--load={name}={name}:{DEMO / name},target={target}" for name in DRAFTERS]
    environment = {"TRITON_CACHE_DIR": f"{kernels}/triton", "XDG_CACHE_HOME": kernels}
    began = time.monotonic()
    with ServiceProcess(
        "verifier", [f"--target={target}", on, "--kv-bytes=512MiB"], environment=environment
    ) as verifier:
        ready = time.monotonic()
        with ServiceProcess(
            "drafter", [on, f"--verifier={verifier.address}", *load], environment=environment
        ):
            ended = time.monotonic()
    seconds = {"verifier": ready - began, "drafter": ended - ready, "both": ended - began}
    return {name: round(each, 1) for name, each in seconds.items()}


def main() -> None:
    """Start twice."""
    device = arguments()
    with tempfile.TemporaryDirectory(prefix="pl") as kernels:
        cold = start(device.type, kernels)
        report(COLD, cold)
        report("seconds_to_start_warm", start(device.type, kernels))
    fail_if_missed(missed_targets({COLD: cold}, TARGETS), device)


if __name__ == "__main__":
    main()
