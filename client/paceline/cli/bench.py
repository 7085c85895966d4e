"""`paceline bench`: side-by-side measurements on this machine."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `paceline bench`."""
    parser.add_argument(
        "--part",
        action="append",
        choices=("echo", "comparison", "replay", "draft"),
        help="measure only this part (repeatable); default: all",
    )
    parser.add_argument("--models", type=Path, default=Path("models/demo"), help="demo models")
    parser.add_argument("--dtype", default="bfloat16", help="of the target: bfloat16 or float32")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the prompts")
    parser.add_argument("--work", type=Path, help="keep the 0.5B random target here")
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file; default: bench/results/MACHINE.json, with the parts' names if not all",
    )


def run(args: argparse.Namespace) -> int:
    """Measure; 0 when all parts ran."""
    from paceline.bench.run import run as measure

    return measure(args)
