"""`paceline calibrate`: makes drafters' confidences mean what they say."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `paceline calibrate`."""
    add = parser.add_argument
    add("drafters", nargs="+", metavar="[NAME=]METHOD[:DIR][,KEY=VALUE...]", help="drafters")
    add("--target", type=Path, default=Path("models/demo/target"), help="their target")
    add(
        "--recordings",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": [...], "tokens": [...], "temperature": T, "seed": S} that the '
        "target wrote; default: it writes some after held-out files of the demo corpus",
    )
    add("--models", type=Path, default=Path("models/demo"), help="where the demo corpus is")
    add("--texts", type=int, default=24, metavar="N", help="texts of each length to write")
    add("--tokens", type=int, default=128, metavar="N", help="tokens of each")
    add("--dtype", default="bfloat16", help="of the target: bfloat16 or float32")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="write NAME.json here; default: calibration.json in the drafter's folder, where it is "
        "found, or NAME-calibration.json here for one without, to be given as calibration=FILE",
    )
    add("--results", type=Path, metavar="FILE", help="write the figures here as JSON")
    add("--pictures", type=Path, metavar="DIR", help="draw reliability diagrams here")


def run(args: argparse.Namespace) -> int:
    """Calibrate; 0 when all is written."""
    from paceline.bench.calibration.run import run as calibrate

    return calibrate(args)
