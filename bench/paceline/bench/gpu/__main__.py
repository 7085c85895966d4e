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

from paceline.bench import reference
from paceline.bench.gpu import decoder, drafts, kernels, services
from paceline.bench.record import commit, describe

MEASUREMENTS = {
    "products": (kernels.products, 70.0),
    "bits": (decoder.bits, 90.0),
    "texts": (services.texts, 150.0),
    "step": (decoder.step, 60.0),
    "start": (services.start, 150.0),
    "drafts": (drafts.drafts, 120.0),
    "rounds": (services.rounds, 350.0),
}  # what reports lines of JSON for a device, and how long it may take. Unit: seconds.


def main() -> int:
    """Write JSON; 0 if all measurements ended well, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m paceline.bench.gpu", description=__doc__
    )
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
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
    names = args.only or list(MEASUREMENTS)
    if args.output is None:  # in this process, whose output has the results
        if args.device == "cpu":
            reference.register()
        for name in names:
            torch.manual_seed(args.seed)
            MEASUREMENTS[name][0](torch.device(args.device))
        return 0
    device = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    command = shlex.join(["python", "-m", __package__, *sys.argv[1:]])
    made = {"command": command, "commit": commit()}
    head = {"machine": describe(), **made, "device": device, "seed": args.seed}
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"{'-'.join(device.lower().split())}.json"
    results: dict[str, Any] = {}
    for name in names:
        results[name] = run(name, args.device, args.seed, MEASUREMENTS[name][1])
        print(name, json.dumps(results[name]), flush=True)
        file.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    print(file)
    return 1 if any("error" in facts for facts in results.values()) else 0


def run(name: str, device: str, seed: int, max_seconds: float) -> dict[str, Any]:
    """Return what a measurement reported in a process of its own, and its `seconds`; with `error`
    if it failed or took too long."""
    began = time.monotonic()
    command = [sys.executable, "-m", __package__, "--only", name]
    command += ["--device", device, "--seed", str(seed)]
    results: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, timeout=max_seconds, check=False)
        output = done.stdout
        if done.returncode:
            stderr = done.stderr.decode(errors="replace")
            results["error"] = stderr[-2000:] or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        results["error"] = f"took more than {max_seconds:g} seconds"
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):
            results |= json.loads(line)
    return results | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
