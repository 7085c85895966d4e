"""Runs every measurement on a GPU in a process of its own with a time limit.

Needs torch and triton, and no network. Results are written after every measurement, so that they
stay if a later one fails or hangs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.bench.record import commit, describe

MEASUREMENTS = {
    "products": 70.0,
    "bits": 90.0,
    "texts": 150.0,
    "step": 60.0,
    "start": 150.0,
    "drafts": 120.0,
    "rounds": 350.0,
    "bandwidth": 90.0,
    "sampling": 40.0,
    "host": 120.0,
}
"""Modules of this package, and how long each may take. Unit: seconds."""


def main() -> int:
    """Write JSON; 0 if all measurements ended well, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m paceline.bench.gpu", description=__doc__
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the measurements")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="only these")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print(
            "this needs a CUDA device, and torch sees none; --device cpu tries it on the CPU",
            file=sys.stderr,
        )
        return 2
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    found: dict[str, Any] = {}
    command = shlex.join(["python", "-m", __package__, *sys.argv[1:]])
    made = {"command": command, "commit": commit()}
    head = {"machine": describe(), **made, "device": name, "seed": args.seed}
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"{'-'.join(name.lower().split())}.json"
    for module in args.only or MEASUREMENTS:
        found[module] = run(module, args.device, args.seed, MEASUREMENTS[module])
        print(module, json.dumps(found[module]), flush=True)
        file.write_text(json.dumps({**head, "results": found}, indent=1) + "\n")
    print(file)
    return 1 if any("error" in facts for facts in found.values()) else 0


def run(module: str, device: str, seed: int, limit: float) -> dict[str, Any]:
    """What a module measured, and its `seconds`; with `error` if it failed or took too long.

    Args:
        module: Name of a module of this package.
        device: cuda or cpu.
        seed: Seed of everything random.
        limit: Unit: seconds.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", f"{__package__}.{module}", device, str(seed)]
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, check=False)
        output = done.stdout
        if done.returncode:
            stderr = done.stderr.decode(errors="replace")
            found["error"] = stderr[-2000:] or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        found["error"] = f"took more than {limit:g} seconds"
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
