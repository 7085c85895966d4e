"""`paceline calibrate`: fits drafters' confidences to how often their tokens are accepted."""

import argparse
from pathlib import Path

from paceline.harness.models import drafter_spec, model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `paceline calibrate`."""
    add = parser.add_argument
    add(
        "drafters",
        nargs="+",
        type=drafter_spec,
        metavar="[NAME=]METHOD[:DIR][,KEY=VALUE...]",
        help="drafters",
    )
    add("--target", type=model_path, default=Path("models/demo/target"), help="their target")
    add(
        "--recordings",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": [...], "tokens": [...], "temperature": T, "seed": S} that the '
        "target wrote; default: the target writes texts after held-out files of --data",
    )
    add("--data", default="stdlib", help="'stdlib' or a folder of text files, as in `train`")
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


def run(args: argparse.Namespace) -> int:
    """Calibrate; returns 0 when all files are written."""
    from paceline.train.calibration import run as calibrate

    return calibrate(args)
