"""Runs all checks on a GPU, each in a process of its own with a time limit.

Needs torch, triton, transformers, numpy and safetensors, no network, and ten minutes at most; the
checks with real services need gRPC's packages too, and say so where they are missing. Every tensor
is drawn anew from a seed that is printed, and outputs are poisoned before they are written. Results
are written after every check, so what was measured stays whatever comes after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from paceline.bench import machine


@dataclass(frozen=True)
class Check:
    """A module of this package, run by itself.

    Attributes:
        module: Its name.
        limit: How long it may take. Unit: seconds.
        part: What of it; empty: all.
        together: It measures no time and no free memory, so that it may run beside others.
    """

    module: str
    limit: float
    part: str = ""
    together: bool = False

    @property
    def name(self) -> str:
        """What it is called in the results."""
        return f"{self.module} {self.part}".strip()


CHECKS = (
    Check("rows", 120, together=True),
    Check("sampling", 120, together=True),
    Check("tokens", 150, together=True),
    *(Check("attention", 240, part, together=True) for part in ("float16", "bfloat16", "float32")),
    Check("attention", 240, "more", together=True),
    Check("ipc", 60),
    Check("bandwidth", 120),
    Check("services", 150),
    Check("decoder", 120),
    Check("backends", 60),
    Check("fusion", 60),
    Check("peer", 120),
)
"""In their order: what must be right, then what is measured and what needs more than one GPU."""

TOTAL_SECONDS = 580


def main() -> int:
    """Run them; write JSON; 0 when everything holds, 1 when not, 2 where there is no GPU."""
    names = list(dict.fromkeys(check.module for check in CHECKS))
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the checks")
    parser.add_argument("--only", choices=names, action="append", help="only these checks")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    print(f"seed {args.seed}", flush=True)
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    found: dict[str, Any] = {}
    results = {"machine": machine.describe(), "device": name, "seed": args.seed, "checks": found}
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"{'-'.join(name.lower().split())}.json"
    wanted = [check for check in CHECKS if check.module in (args.only or names)]
    for check, facts in run_checks(wanted, args.device, args.seed):
        found[check.name] = facts
        print(check.name, json.dumps(facts), flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
    for kind in ("skipped", "error"):
        print(f"{kind}:", ", ".join(name for name in found if kind in found[name]) or "none")
    print(file)
    return 1 if any("error" in facts for facts in found.values()) else 0


def run_checks(
    checks: Sequence[Check], device: str, seed: int
) -> Iterator[tuple[Check, dict[str, Any]]]:
    """Each check with what came of it, as soon as it is done.

    Neighbours that may run together do: most of their time goes into compiling kernels.
    """
    end = time.monotonic() + TOTAL_SECONDS
    for together, group in groupby(checks, key=lambda check: check.together):
        workers = max(1, (os.cpu_count() or 1) // 2) if together else 1
        with ThreadPoolExecutor(workers) as pool:
            running = {pool.submit(run_check, check, device, seed, end): check for check in group}
            for done in as_completed(running):
                yield running[done], done.result()


def run_check(check: Check, device: str, seed: int, end: float) -> dict[str, Any]:
    """What a check measured, with ``error`` where it does not hold, and its ``seconds``.

    Args:
        check: Which one.
        device: cuda or cpu.
        seed: Of all that it draws.
        end: No check goes on after this. Unit: seconds of time.monotonic().
    """
    began = time.monotonic()
    limit = min(check.limit, end - began)
    if limit <= 0:
        return {"error": "no time was left"}
    module = f"paceline.bench.gpu.{check.module}"
    command = [sys.executable, "-m", module, device, str(seed), check.part]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, check=False)
        output = done.stdout
        if done.returncode:
            said = done.stderr.decode(errors="replace")
            found["error"] = said[-2000:] or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        found["error"] = f"not done within {limit:.0f} seconds"
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
