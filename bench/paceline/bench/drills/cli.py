"""`paceline drills`: break things under load, and check what must hold."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `paceline drills`."""
    parser.add_argument(
        "drill", nargs="*", metavar="DRILL", help="its name, in quotes; default: all of them"
    )
    parser.add_argument("--short", action="store_true", help="fewer and smaller: minutes")
    parser.add_argument("--models", type=Path, default=Path("models/demo"), help="demo models")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: bench/results/drills-MACHINE.json"
    )


def run(args: argparse.Namespace) -> int:
    """Run them; 0 if everything held, 2 for a name that is none."""
    from paceline.bench.drills.run import DRILLS
    from paceline.bench.drills.run import run as run_drills

    unknown = set(args.drill) - set(DRILLS)
    if unknown:
        print(f"paceline drills: no drill {', '.join(unknown)}; there are: {', '.join(DRILLS)}")
        return 2
    return run_drills(args)
