"""Runs all checks on a GPU, each in a process of its own with a time limit.

Needs torch, triton, transformers, numpy and safetensors, no network, and ten minutes at most. Every
tensor is drawn anew from a seed that is printed, and outputs are poisoned before they are written.
Results are written after every check, so what was measured stays whatever comes after it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.bench import machine

LIMITS = {
    "ipc": 60,
    "rows": 60,
    "sampling": 60,
    "attention": 150,
    "tokens": 90,
    "bandwidth": 120,
    "backends": 60,
    "decoder": 120,
}
"""The checks in their order, and how long each may take. Unit: seconds."""

TOTAL_SECONDS = 570


def main() -> int:
    """Run them; write JSON; 0 when everything holds, 1 when not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the checks")
    parser.add_argument("--only", choices=LIMITS, action="append", help="only these checks")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    print(f"seed {args.seed}", flush=True)
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    results: dict[str, Any] = {
        "machine": machine.describe(), "device": name, "seed": args.seed, "checks": {}
    }  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"{'-'.join(name.lower().split())}.json"
    end = time.monotonic() + TOTAL_SECONDS
    for check in args.only or LIMITS:
        limit = min(LIMITS[check], end - time.monotonic())
        results["checks"][check] = found = run_check(check, args.device, args.seed, limit)
        print(check, json.dumps(found), flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
    failed = [check for check, found in results["checks"].items() if "error" in found]
    print(f"{file}: {'failed: ' + ', '.join(failed) if failed else 'all checks hold'}")
    return 1 if failed else 0


def run_check(check: str, device: str, seed: int, limit: float) -> dict[str, Any]:
    """What a check measured, with ``error`` where it does not hold, and its ``seconds``."""
    if limit <= 0:
        return {"error": "no time was left"}
    command = [sys.executable, "-m", f"paceline.bench.gpu.{check}", device, str(seed)]
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        output = done.stdout
        if done.returncode:
            found["error"] = done.stderr[-2000:] or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
        found["error"] = f"not done within {limit:.0f} seconds"
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
