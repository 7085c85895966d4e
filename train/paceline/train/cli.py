"""`paceline train target` and `paceline train lm`."""

import argparse
from pathlib import Path

import torch

from paceline.train.corpus import STDLIB, load_corpus
from paceline.train.loop import Run
from paceline.train.preset import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `paceline train` to `parser`."""
    commands = parser.add_subparsers(dest="train_command", required=True)
    target = commands.add_parser("target", help="train a target model from nothing")
    _add_common(target, preset="cpu", out="models/demo/target")


def main(args: argparse.Namespace) -> int:
    """Run the sub-command in `args`; 0 when it finished, 130 when it was interrupted."""
    from paceline.train.target import train_target

    preset = PRESETS[args.preset]
    run = Run(
        work=args.work,
        minutes=args.minutes or preset.minutes,
        steps=args.steps or preset.steps,
        device=args.device,
        compile=args.compile,
    )
    corpus = load_corpus(args.data, preset.files, preset.heldout_files)
    try:
        train_target(corpus, preset, run, args.out)
    except KeyboardInterrupt as stop:
        print(f"{stop}; run the same command again to go on")
        return 130
    return 0


def _add_common(parser: argparse.ArgumentParser, preset: str, out: str) -> None:
    parser.add_argument("--preset", choices=sorted(PRESETS), default=preset)
    parser.add_argument("--data", default=STDLIB, help="'stdlib' or a folder of text files")
    parser.add_argument("--minutes", type=float, help="time budget of stepping, in minutes")
    parser.add_argument("--steps", type=int, help="step budget")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--out", type=Path, default=Path(out), help="model folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the model first")
