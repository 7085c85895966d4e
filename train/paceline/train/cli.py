"""`paceline train target` and `paceline train lm`."""

import argparse
import os
import sys
from pathlib import Path

from paceline.train.preset import PRESETS

_DEMO = Path("models/demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `paceline train` to `parser`."""
    commands = parser.add_subparsers(dest="train_command", required=True, metavar="MODEL")
    target = commands.add_parser("target", help="train a target")
    _add_common(target, preset="cpu", out=_DEMO / "target")
    target.add_argument(
        "--from", dest="start", type=Path, help="model folder to train further, not from nothing"
    )
    lm = commands.add_parser("lm", help="distil a target into a small drafter LM")
    _add_common(lm, preset="lm", out=_DEMO / "lm")
    lm.add_argument(
        "--target", type=Path, default=_DEMO / "target", help="model folder of the target"
    )


def main(args: argparse.Namespace) -> int:
    """Run the sub-command in `args`; 0 when done, 1 on a bad argument, 130 when interrupted."""
    # torch and transformers take seconds to import: not for `--help`.
    import torch

    from paceline.train.corpus import load_corpus
    from paceline.train.lm import train_lm
    from paceline.train.loop import Run
    from paceline.train.prompts import load_prompts
    from paceline.train.target import train_target

    preset = PRESETS[args.preset]
    run = Run(
        work=args.work or _default_work() / f"{args.train_command}-{args.preset}",
        minutes=args.minutes or preset.minutes,
        steps=args.steps or preset.steps,
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        compile=args.compile,
    )
    try:
        corpus = load_corpus(args.data, preset.files, preset.heldout_files, preset.wide)
        prompts = load_prompts(args.prompts) if args.prompts.is_dir() else []
        if args.train_command == "target":
            train_target(corpus, preset, run, args.out, prompts, args.start)
        else:
            train_lm(args.target, corpus, preset, run, args.out, prompts)
    except KeyboardInterrupt as stop:
        print(f"{stop}; give the same command again to go on", file=sys.stderr)
        return 130
    except (OSError, ValueError, RuntimeError) as error:
        print(f"paceline train: {error}", file=sys.stderr)
        return 1
    print(f"{args.out} is ready; its numbers are in {args.out / 'README.md'}")
    return 0


def _add_common(parser: argparse.ArgumentParser, preset: str, out: Path) -> None:
    parser.add_argument("--preset", choices=sorted(PRESETS), default=preset)
    parser.add_argument("--data", default="stdlib", help="'stdlib' or a folder of text files")
    parser.add_argument("--minutes", type=float, help="time budget of stepping, in minutes")
    parser.add_argument("--steps", type=int, help="step budget")
    parser.add_argument("--out", type=Path, default=out, help="model folder to write")
    parser.add_argument(
        "--work", type=Path, help="folder of checkpoints; a run found there goes on"
    )
    parser.add_argument(
        "--prompts", type=Path, default=_DEMO / "prompts", help="what the card measures on"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--compile", action="store_true", help="compile the model first")


def _default_work() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "train"
