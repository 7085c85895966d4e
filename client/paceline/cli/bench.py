"""`paceline bench`: side-by-side measurements on this machine."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `paceline bench`."""
    parser.add_argument(
        "--part",
        action="append",
        choices=(
            *("echo", "comparison", "stretched", "replay", "draft"),
            *("acceptance", "coupling", "reach", "heads", "selfspec", "collection"),
            *("costs", "load", "budgets", "remote"),
        ),
        help="measure only this part (repeatable), and keep the others of the file; default: all",
    )
    parser.add_argument(
        "--set",
        action="append",
        help="measure only this set of prompts, or this loop of the load (repeatable)",
    )
    parser.add_argument("--models", type=Path, default=Path("models/demo"), help="demo models")
    parser.add_argument(
        "--longspec", type=Path, help="LongSpec drafter of the target; default: MODELS/longspec"
    )
    parser.add_argument(
        "--dflash", type=Path, help="for heads: the demo's DSpark drafter trained without them"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the target: bfloat16 or float32")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the prompts")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="window of each point of the load"
    )
    parser.add_argument(
        "--texts", type=int, default=4, help="long prompts of each set and context length"
    )
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=DIR",
        help="another drafter of the target, longspec or lm, for the part `budgets` (repeatable)",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, help="keep the made-up large targets here")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: bench/results/MACHINE.json"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; 0 when all parts ran."""
    from paceline.bench.run import run as measure

    return measure(args)
